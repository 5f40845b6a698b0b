"""The one training loop: its schedule, what it labels, and what it does with a loss that is not finite."""

import pytest
import torch

from mdn.experiments.tiny_training import (
    IGNORE_INDEX,
    LabelledTokens,
    TinyTraining,
    labelled_accuracy,
    labelled_logits,
    make_optimizer,
    train_tiny,
)
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 8, "expand_v": 1}
    return MomentumDeltaNetForCausalLM(MomentumDeltaNetConfig(vocab_size=20, use_cache=False, **sizes))


def copying_batch(seed=0):
    """Sixteen tokens; every fourth is asked for again at the position after it."""
    inputs = torch.randint(2, 20, (8, 16), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(inputs, IGNORE_INDEX)
    labels[:, 1::4] = inputs[:, 0::4]
    return LabelledTokens(inputs, labels)


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    training = TinyTraining(steps=100, learning_rate=2.0, warmup=0.1)
    rates = [training.rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([2 * (step + 1) / 10 for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates == sorted(rates[:11]) + sorted(rates[11:], reverse=True)


def test_logits_at_labelled_positions_are_those_of_the_whole_model(model):
    batch = copying_batch()
    with torch.no_grad():
        found, labels = labelled_logits(model, batch)
        everywhere = model(batch.inputs).logits
    asked = batch.labels != IGNORE_INDEX
    torch.testing.assert_close(found, everywhere[asked])
    assert torch.equal(labels, batch.labels[asked])


def test_accuracy_is_the_share_of_labelled_positions_that_are_right(model):
    batch = copying_batch()
    with torch.no_grad():
        likeliest = model(batch.inputs).logits.argmax(-1)
    all_right = LabelledTokens(batch.inputs, torch.where(batch.labels != IGNORE_INDEX, likeliest, IGNORE_INDEX))
    assert labelled_accuracy(model, [all_right]) == 1.0
    wrong_rows = all_right.labels.clone()
    wrong_rows[:2] = torch.where(wrong_rows[:2] != IGNORE_INDEX, (wrong_rows[:2] + 1) % 20, IGNORE_INDEX)
    assert labelled_accuracy(model, [LabelledTokens(batch.inputs, wrong_rows)]) == 0.75


def test_training_lowers_the_loss_and_leaves_the_model_ready_to_evaluate(model):
    outcome = train_tiny(model, map(copying_batch, range(60)), TinyTraining(steps=60, learning_rate=1e-2))
    assert outcome.diverged_at is None
    assert outcome.losses[0][0] == 0
    assert outcome.losses[-1][0] == 59
    assert outcome.losses[-1][1] < outcome.losses[0][1] - 0.3
    assert not model.training


def test_a_loss_that_is_not_finite_ends_the_training_before_its_step(model):
    def loss_of(model, batch):
        loss = labelled_logits(model, batch)[0].mean()
        return loss * float("nan") if batch.labels[0, 0] == 1 else loss

    good, bad = copying_batch(), copying_batch()
    bad.labels[0, 0] = 1
    outcome = train_tiny(model, [good, good, bad, good], TinyTraining(4, 1e-3), loss_of=loss_of)
    assert outcome.diverged_at == 2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_only_matrices_decay(model):
    decayed, free = make_optimizer(model, TinyTraining(10, 1e-3, weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))

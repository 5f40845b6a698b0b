"""A pack equals its samples apart, forward and backward, and nothing leaks between them."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, Trainer, TrainingArguments

from definition import relative_error
from mdn.ops.boundaries import SequenceBoundaries
from small_models import MODELS, small_model, tokens

LENGTHS = [5, 1, 70, 2, 1, 33]


def packed_inputs(kind: str):
    """The ways to say where the samples of a pack begin; collators may add a mask of ones."""
    kind, _, with_mask = kind.partition(" and ")
    if with_mask:
        return {**packed_inputs(kind), "attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    if kind == "seq_idx":
        return {"seq_idx": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()}
    if kind == "position_ids":
        return {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    if kind == "cu_seq_lens_q":
        return {"cu_seq_lens_q": cu_seqlens.int(), "cu_seq_lens_k": cu_seqlens.int(), "max_length_q": max(LENGTHS)}
    return {"cu_seqlens": cu_seqlens if kind == "cu_seqlens" else SequenceBoundaries.from_cu_seqlens(cu_seqlens)}


@torch.no_grad()
@pytest.mark.parametrize(
    "kind",
    [
        *("cu_seqlens", "boundaries", "cu_seq_lens_q", "position_ids", "seq_idx"),
        *("cu_seqlens and a mask of ones", "position_ids and a mask of ones", "seq_idx and a mask of ones"),
    ],
)
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_every_way_to_mark_a_pack_gives_the_samples_apart(name, kind):
    model = small_model(name)
    ids = tokens(1, sum(LENGTHS))
    together = model(ids, **packed_inputs(kind)).logits
    apart = torch.cat([model(sample).logits for sample in ids.split(LENGTHS, dim=1)], dim=1)
    assert relative_error(together, apart) < 1e-5


def test_the_trainer_leaves_the_marks_of_a_pack_in_the_batch(tmp_path):
    model, ids = small_model(), tokens(1, sum(LENGTHS))
    marks = packed_inputs("seq_idx")
    labels = ids.clone()
    labels[0, packed_inputs("cu_seqlens")["cu_seqlens"][:-1]] = -100  # as collators do: the Trainer counts the labels
    expected = model(ids, labels=labels, **marks).loss.item()
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_eval_batch_size": 1}
    data = [{"input_ids": ids[0], "labels": labels[0], "seq_idx": marks["seq_idx"][0]}]
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    data = [{"input_ids": ids[0], "labels": labels[0], **packed_inputs("cu_seqlens")}]
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[N \+ 1\]"):  # a column has one row too many
        trainer.evaluate(data)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_layers_may_lie_on_several_devices(name):
    """As with device_map="auto" on several GPUs; here the second device is meta."""
    model, ids = small_model(name), tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def move(module, arguments, options):
        return (arguments[0].to("meta"), *arguments[1:]), options

    for module in (model.model.layers[1], model.model.norm, model.lm_head):
        module.to("meta")
    model.model.layers[1].register_forward_pre_hook(move, with_kwargs=True)
    first = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
    found = [first.logits, model(ids[:, :9], attention_mask=mask[:, :9], use_cache=False).logits]
    for piece in (slice(9, 12), slice(12, 13)):
        seen = mask[:, : piece.stop]
        found.append(model(ids[:, piece], attention_mask=seen, past_key_values=first.past_key_values).logits)
    assert [tuple(x.shape[:2]) for x in found] == [(2, 9), (2, 9), (2, 3), (2, 1)]
    assert all(x.is_meta for x in found)


def test_boundaries_on_the_cpu_serve_a_model_on_another_device():
    model, ids = small_model("hybrid").to("meta"), tokens(1, sum(LENGTHS)).to("meta")
    for kind in ("cu_seqlens", "boundaries"):
        output = model(ids, labels=ids, **packed_inputs(kind))
        assert (output.logits.device.type, output.loss.shape) == ("meta", ())


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_positions_that_jump_are_one_sequence_in_every_batch(name):
    """Only a restart begins a sequence; rotary attention sees the distance."""
    model, ids = small_model(name), tokens(2, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 9]])
    both = model(ids, position_ids=positions.expand(2, -1)).logits
    for row in range(2):
        alone = model(ids[row : row + 1], position_ids=positions).logits
        assert relative_error(alone, both[row : row + 1]) < 1e-5
    pack = torch.cat([positions, positions[:, :6]], 1)
    together = model(torch.cat([ids[:1], ids[1:, :6]], 1), position_ids=pack).logits
    assert relative_error(together, torch.cat([both[:1], both[1:, :6]], 1)) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_separate_in_loss_and_gradients(name):
    model = small_model(name).train()
    ids = tokens(1, sum(LENGTHS))
    samples = ids.split(LENGTHS, dim=1)
    targets = sum(length - 1 for length in LENGTHS)

    def gradients(loss):
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    loss, found = gradients(model(ids, labels=ids, **packed_inputs("cu_seqlens")).loss)
    apart = [model(sample, labels=sample, num_items_in_batch=targets).loss for sample in samples if sample.shape[1] > 1]
    expected_loss, expected = gradients(sum(apart))
    torch.testing.assert_close(loss, expected_loss)
    for name, one, other in zip(dict(model.named_parameters()), found, expected):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max() + 1e-8, name


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_perturbing_another_sample_of_the_pack_changes_nothing(name):
    model = small_model(name)
    ids = tokens(1, sum(LENGTHS))
    begin, end = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    other = (ids + 1) % model.config.vocab_size
    other[:, begin:end] = ids[:, begin:end]
    packed = packed_inputs("cu_seqlens")
    before, after = model(ids, **packed).logits, model(other, **packed).logits
    assert torch.equal(before[:, begin:end], after[:, begin:end])
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
)
def test_the_trainers_padding_free_collator_gives_the_loss_of_the_samples(options):
    model = small_model("hybrid")
    samples = [tokens(1, length, seed=length)[0].tolist() for length in (9, 4, 17)]
    collate = DataCollatorWithFlattening(**options)
    batch = collate([{"input_ids": sample} for sample in samples])
    losses = [model(torch.tensor([s]), labels=torch.tensor([s])).loss * (len(s) - 1) for s in samples]
    torch.testing.assert_close(model(**batch).loss, sum(losses) / sum(len(s) - 1 for s in samples))


def test_masked_tokens_are_neither_asked_nor_targets():
    model = small_model()
    ids = tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5], mask[1, 9:] = 0, 0
    losses = [model(ids[:1, 5:], labels=ids[:1, 5:]).loss * 6, model(ids[1:, :9], labels=ids[1:, :9]).loss * 8]
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=ids).loss, sum(losses) / 14)


def test_gradients_of_a_padded_batch_equal_those_of_its_rows():
    model = small_model("hybrid").train()
    ids = tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    padded = torch.autograd.grad(model(ids, attention_mask=mask, labels=ids).loss * 17, list(model.parameters()))
    rows = model(ids[:1, 5:], labels=ids[:1, 5:]).loss * 6 + model(ids[1:], labels=ids[1:]).loss * 11
    for one, other in zip(padded, torch.autograd.grad(rows, list(model.parameters()))):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max() + 1e-8


def test_contradictions_are_refused_by_name():
    model, ids = small_model(), tokens(2, 6)
    cu_seqlens = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="batch of 1"):
        model(ids, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="a pack has no padding"):
        model(ids[:1], cu_seqlens=cu_seqlens, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="cu_seqlens and seq_idx contradict"):
        model(ids[:1], cu_seqlens=cu_seqlens, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must be equal"):
        model(ids[:1], cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match=r"seq_idx must have shape \[1, 6\]"):
        model(ids[:1], seq_idx=torch.tensor([0, 0, 1, 1, 1, 1]))
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids[:1], cu_seqlens=cu_seqlens, past_key_values=model(ids[:1], use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="cover all 6 tokens"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 5]))
    restarting = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for mask in (None, torch.ones(2, 6)):
        with pytest.raises(ValueError, match="position_ids that restart"):
            model(ids, position_ids=restarting.expand(2, -1), attention_mask=mask)
    with pytest.raises(ValueError, match="position_ids restart inside a row"):
        model(ids[:1], position_ids=restarting, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]))
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids[:1], position_ids=restarting, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="use_cache=True cannot continue a pack"):
        model(ids[:1], cu_seqlens=cu_seqlens, use_cache=True)

"""NaN guard, gate statistics, decay groups, the held-out figures, and what a finished run leaves behind."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mdn.layers import MIXERS, ShortConvolution
from mdn.models import MomentumDeltaNetForCausalLM
from mdn.training import checkpoints, run, trainer
from mdn.training.build import build_model, model_config
from mdn.training.dataset import prepare_data
from mdn.training.evaluate import evaluate, measure_references
from mdn.training.monitor import NonFiniteError, measure, read_metrics
from mdn.training.tokenizer import Encoder
from small_models import small_model
from training_support import losses, tiny_recipe


@pytest.fixture
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "plot_loss", lambda *_: None)
    monkeypatch.setattr(run, "plot_gates", lambda *_: None)


@pytest.fixture
def _poisoned_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first pass of step 5 on, one gate parameter of layer 0 is NaN for as long as that step lasts."""
    original = trainer.RecipeTrainer.training_step

    def training_step(self, model, inputs, count=None):
        parameter = model.model.layers[0].attn.dt_bias
        clean = parameter.detach().clone()
        if self.state.global_step == 4:
            parameter.data[0] = math.nan
        loss = original(self, model, inputs, count)
        parameter.data.copy_(clean)
        return loss

    monkeypatch.setattr(trainer.RecipeTrainer, "training_step", training_step)
    # The diagnosis runs the batch again and must see what the step saw.
    explain = trainer.explain

    def poisoned_explain(model, *arguments):
        model.model.layers[0].attn.dt_bias.data[0] = math.nan
        return explain(model, *arguments)

    monkeypatch.setattr(trainer, "explain", poisoned_explain)


@pytest.mark.usefixtures("_no_plots", "_poisoned_step")
def test_a_nan_stops_training_and_the_message_names_step_layer_and_gates(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as error:
        run.train(tiny_recipe(tmp_path))
    message = str(error.value)
    assert message.startswith("step 5: loss nan")
    assert "model.layers.0.attn" in message
    assert "gates of layer 0" in message
    assert "alpha_not_finite" in message
    assert [path.name for path in checkpoints.all_paths(tmp_path / "run")] == ["checkpoint-3"]


@pytest.mark.usefixtures("_no_plots")
def test_a_nan_step_is_skipped_when_asked_and_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = trainer.RecipeTrainer.training_step
    weights: dict[int, torch.Tensor] = {}

    def training_step(self, model, inputs, count=None):
        weights.setdefault(self.state.global_step, model.lm_head.weight.detach().clone())
        loss = original(self, model, inputs, count)
        if self.state.global_step == 4:
            model.lm_head.weight.grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(trainer.RecipeTrainer, "training_step", training_step)
    run.train(tiny_recipe(tmp_path, training={"non_finite": "skip", "steps": 7}))
    assert torch.equal(weights[4], weights[5])
    assert not torch.equal(weights[5], weights[6])
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "skipped" in line] == [5]
    assert "step skipped: step 5" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_plots")
def test_skipping_ends_when_every_step_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer.RecipeTrainer.training_step

    def training_step(self, model, inputs, count=None):
        loss = original(self, model, inputs, count)
        model.lm_head.weight.grad[0, 0] = math.nan
        return loss

    monkeypatch.setattr(trainer.RecipeTrainer, "training_step", training_step)
    training = {"non_finite": "skip", "max_skipped_steps": 2}
    with pytest.raises(NonFiniteError, match=r"step 3: .*2 steps in a row were skipped already"):
        run.train(tiny_recipe(tmp_path, training=training))


@pytest.mark.usefixtures("_no_plots")
def test_recomputing_activations_changes_no_loss_and_bfloat16_stays_near(tmp_path: Path) -> None:
    run.train(tiny_recipe(tmp_path, training={"steps": 4}))
    run.train(tiny_recipe(tmp_path, "recomputed", training={"steps": 4, "gradient_checkpointing": True}))
    run.train(tiny_recipe(tmp_path, "half", training={"steps": 4, "precision": "bfloat16"}))
    full, recomputed, half = (
        [float.fromhex(value) for value in losses(tmp_path / name)] for name in ("run", "recomputed", "half")
    )
    assert recomputed == pytest.approx(full, abs=1e-6)
    assert half == pytest.approx(full, rel=0.02)
    assert half != full


def test_gate_statistics_are_those_of_the_gates_of_every_layer(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, model={"num_hidden_layers": 2, "min_log_mu": -0.01})
    model = build_model(recipe, model_config(recipe, 257, 256))
    ids = torch.arange(40)[None]
    measured = measure(model, ids)
    hidden = model.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for layer, values in enumerate(measured):
        block = model.model.layers[layer]
        gates = block.attn.gates(block.attn_norm(hidden[layer]))
        assert values["layer"] == layer
        assert values["alpha"] == pytest.approx(gates.log_alpha.exp().mean().item(), rel=1e-4)
        assert values["mu"] == pytest.approx(gates.log_mu.exp().mean().item(), rel=1e-4)
        assert values["eta"] == pytest.approx(gates.eta.mean().item(), rel=1e-4)
        assert values["mu_at_clamp"] == pytest.approx((gates.log_mu == -0.01).float().mean().item(), abs=1e-3)
        assert 0 < values["mu_at_clamp"] <= 1
        assert values["state_rms"] > 0
        assert values["momentum_rms"] > 0
    assert len(measured) == 2


def test_gates_norms_and_biases_are_not_decayed_unless_asked(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    model = build_model(recipe, model_config(recipe, 257, 256))
    names = {name for name, _ in model.named_parameters()}
    undecayed = names - set(trainer.decayed_parameters(model, decay_gates=False))
    last = {name.split(".")[-1] for name in undecayed if not name.endswith("norm.weight")}
    assert last == {"A_log", "dt_bias", "Mu_log", "mu_bias", "log_factor", "D_log"}
    assert {name for name in names if "norm" in name} <= undecayed
    assert set(trainer.decayed_parameters(model, decay_gates=True)) == names


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_only_matrices_are_decayed_whatever_the_mixer(mixer: str) -> None:
    model = small_model(mixer, mlp="rwkv7" if mixer == "rwkv7" else "swiglu")
    matrices = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding | ShortConvolution)
    }
    assert set(trainer.decayed_parameters(model, decay_gates=False)) == matrices


def test_held_out_figures_are_those_of_one_plain_pass_over_every_window(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    data = prepare_data(recipe)
    model = build_model(recipe, model_config(recipe, 257, 256)).double()
    for reset in (False, True):
        measured = evaluate(model, data.held_out, 32, reset, show=False)
        nats = sum(_window_nats(model, data.held_out, begin, reset) for begin in range(0, len(data.held_out) - 1, 32))
        assert measured["loss"] == pytest.approx(nats / (len(data.held_out) - 1), rel=1e-6)
        assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))
        assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2) / data.held_out.bytes, rel=1e-6)


def _window_nats(model: MomentumDeltaNetForCausalLM, stream, begin: int, reset: bool) -> float:
    """Negative log likelihood of one window, one document after the other when states reset."""
    ids = stream.read(begin, min(begin + 33, len(stream)))[0].tolist()
    starts = [i for i, token in enumerate(ids[:-1]) if i == 0 or (reset and token == 256)]
    total = 0.0
    for start, end in zip(starts, [*starts[1:], len(ids) - 1]):
        logits = model(input_ids=torch.tensor([ids[start:end]]), use_cache=False).logits[0].log_softmax(-1)
        total -= sum(logits[i, ids[start + i + 1]].item() for i in range(end - start))
    return total


def test_references_are_measured_on_the_held_out_text(tmp_path: Path) -> None:
    data = prepare_data(tiny_recipe(tmp_path, tokenizer={"kind": "bpe", "vocab_size": 300}))
    files = sorted((tmp_path / "corpus").iterdir())
    text = b"".join(files[number].read_bytes() for number in data.held_out.documents)
    training = b"".join(files[number].read_bytes() for number in data.training.documents)
    references = measure_references(data.training, data.held_out, Encoder(data.tokenizer), [])
    assert references["uniform bytes"] == 8.0
    counts = {byte: training.count(bytes([byte])) + 1 for byte in range(256)}
    unigram = -sum(math.log2(counts[byte] / sum(counts.values())) for byte in text) / len(text)
    assert references["unigram bytes"] == pytest.approx(unigram)
    assert references["xz -9"] == pytest.approx(8 * len(lzma.compress(text, preset=9)) / len(text))


def test_a_finished_run_leaves_plots_a_card_metrics_and_a_model_that_loads(tmp_path: Path) -> None:
    sample = {"prompt": "alpha beta", "max_new_tokens": 4}
    recipe = tiny_recipe(tmp_path, logging={"tensorboard": True, "evaluate_every": 6}, sample=sample)
    result = run.train(recipe, command="mdn train tiny")
    directory = tmp_path / "run"
    for name in ("loss.png", "loss.svg", "gates.png", "recipe.yaml", "summary.json", "model/README.md"):
        assert (directory / name).stat().st_size > 0, name
    assert list((directory / "tensorboard").iterdir())
    assert "mdn train tiny" in (directory / "loss.svg").read_text()
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines if "held_out" in line] == [6, 12]
    assert [line["step"] for line in lines if "gates" in line] == [0, 4, 8, 12]
    assert len(losses(directory)) == 12
    summary = json.loads((directory / "summary.json").read_text())
    assert result.summary is not None
    card = (directory / "model" / "README.md").read_text()
    assert f"**{summary['held_out']['bits_per_byte']:.3f}**" in card
    assert "mdn train tiny" in card
    assert "license" not in card  # that of the weights depends on the data, and is the user's to choose
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    again = evaluate(model, prepare_data(recipe).held_out, 32, True, show=False)
    assert again["bits_per_byte"] == pytest.approx(summary["held_out"]["bits_per_byte"], rel=1e-5)
    prompt = torch.tensor([[256, *tokenizer("alpha beta")["input_ids"]]])
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, 1:])
    assert summary["sample"] == text.replace("<|endoftext|>", "")
    assert not (directory / ".saving").exists()


def test_too_little_memory_for_xz_does_not_lose_a_finished_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compress(*_: object, **__: object) -> bytes:
        assert (tmp_path / "run" / "model" / "model.safetensors").is_file()  # the model is there before
        raise MemoryError

    monkeypatch.setattr("lzma.compress", compress)
    summary = run.train(tiny_recipe(tmp_path, training={"steps": 1})).summary
    assert summary is not None
    assert summary["notes"] == ["xz -9 reference left out: it needs about 700 MB of memory"]
    assert set(summary["references"]) == {"uniform bytes", "unigram bytes"}
    assert (tmp_path / "run" / "summary.json").is_file()

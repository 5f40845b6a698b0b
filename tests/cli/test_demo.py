"""The demo recipe scaled down, from the command line to the files it leaves, and with every other mixer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdn.cli import main
from mdn.layers import MIXERS
from mdn.training import run

SMALL = (
    "data.max_bytes=150_000",
    "data.held_out_bytes=10_000",
    "tokenizer.vocab_size=400",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.head_dim=16",
    "training.batch_tokens=256",
    "training.micro_batch_tokens=128",
    "training.sequence_length=64",
    "training.steps=3",
    "training.warmup_steps=1",
    "logging.gates_every=2",
    "sample.max_new_tokens=5",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


def test_the_demo_trains_measures_completes_and_leaves_its_files(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "demo"
    results = tmp_path / "results.json"
    assert main(["demo", *SMALL, cache, f"output={directory}", "--json", str(results)]) == 0
    output = capsys.readouterr().out
    for words in ("this model", "uniform bytes", "unigram bytes", "xz -9", "a completion", "def read_lines(path):"):
        assert words in output
    for name in ("loss.png", "loss.svg", "gates.png", "metrics.jsonl", "recipe.yaml", "model/README.md"):
        assert (directory / name).stat().st_size > 0, name
    assert json.loads(results.read_text())["steps"] == 3
    before = (directory / "metrics.jsonl").stat().st_mtime_ns
    assert main(["demo", *SMALL, cache, f"output={directory}"]) == 0  # finished: shown again, not trained again
    assert "this model" in capsys.readouterr().out
    assert (directory / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize("mixer", sorted(set(MIXERS) - {"momentum_deltanet"}))
def test_the_demo_recipe_trains_every_other_mixer(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixer: str
) -> None:
    monkeypatch.setattr(run, "plot_loss", lambda *_: None)
    monkeypatch.setattr(run, "plot_gates", lambda *_: None)
    results = tmp_path / "results.json"
    arguments = [*SMALL, cache, f"output={tmp_path / mixer}", f"model.mixer={mixer}", "--json", str(results)]
    assert main(["train", "demo", *arguments]) == 0
    summary = json.loads(results.read_text())
    assert summary["mixer"] == mixer
    assert 0 < summary["held_out"]["bits_per_byte"] < 8

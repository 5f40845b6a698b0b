"""`mdn bench train`: equal sizes, ratios to attention from one run, memory that grows with what a step keeps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mdn.bench.training_step import (
    BASELINE,
    StepSize,
    compare_with_torch,
    comparison_table,
    measure,
    peak_memory,
    profile_recipe,
    profile_table,
)
from mdn.cli import main
from mdn.common.results import read_results
from mdn.layers import MIXERS
from mdn.training.build import count_parameters

SIZE = StepSize(hidden_size=128, layers=1, vocab_size=64, tokens=64, lengths=(32, 64))


def test_models_have_equally_many_parameters() -> None:
    counts = {mixer: count_parameters(config) for mixer, config in SIZE.configs(list(MIXERS)).items()}
    assert all(count == pytest.approx(counts[BASELINE], rel=0.005) for count in counts.values()), counts


def test_ratios_are_speeds_relative_to_attention_at_the_same_length() -> None:
    rows = measure(["momentum_deltanet"], SIZE, repeats=2, budget_seconds=5)
    assert [(row["mixer"], row["length"]) for row in rows] == [
        (mixer, length) for length in SIZE.lengths for mixer in ("momentum_deltanet", BASELINE)
    ]
    for row in rows:
        attention = next(other for other in rows if other["mixer"] == BASELINE and other["length"] == row["length"])
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / attention["tokens_per_second"])
        assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])


def test_peak_memory_sees_what_a_step_allocates_and_frees() -> None:
    def step(megabytes: int) -> None:
        torch.ones(megabytes << 18).add_(1)

    assert peak_memory(lambda: step(64)) == pytest.approx(64 << 20, rel=0.2)
    assert peak_memory(lambda: step(16)) == pytest.approx(16 << 20, rel=0.2)


def test_peak_memory_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mdn.bench.training_step.PROC_RESET", tmp_path / "not there")
    assert math.isnan(peak_memory(lambda: None))


def test_the_command_writes_json_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "32", "--tokens", "32", "--hidden-size", "64", "--layers", "1", "--repeats", "2"]
    files = ["--json", str(tmp_path / "train.json"), "--plot", str(tmp_path / "train.png")]
    assert main(["bench", "train", "--mixers", "gated_deltanet", *sizes, *files]) == 0
    assert "gated_deltanet" in capsys.readouterr().out
    assert {row["mixer"] for row in read_results(tmp_path / "train.json", "train")["rows"]} == {
        "gated_deltanet",
        "attention",
    }
    assert (tmp_path / "train.svg").stat().st_size > 0


def test_an_unknown_mixer_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "--mixers", "deltanett"]) == 2
    assert "--mixers: unknown deltanett; expected some of momentum_deltanet" in capsys.readouterr().err


def test_a_step_with_native_layers_learns_as_the_torch_one_and_its_shares_add_up():
    compared = compare_with_torch(SIZE, repeats=1, budget_seconds=0.01)
    native, torch_row = compared["rows"]["native"], compared["rows"]["torch"]
    assert abs(native["loss"] - torch_row["loss"]) < 1e-3
    for row in (native, torch_row):
        assert abs(row["products"] + row["rule"] + row["rest"] - 1) < 1e-6
    assert len(comparison_table(compared).rows) == 2


def test_a_profile_divides_the_time_of_a_recipes_step() -> None:
    profile = profile_recipe("demo", most_tokens=64)
    assert (profile["tokens"], profile["length"]) == (64, 64)
    assert profile["products"] + profile["rule"] + profile["rest"] == pytest.approx(1)
    assert min(profile["products"], profile["rule"], profile["rest"]) > 0
    assert profile_table([profile]).rows[0][:2] == ["demo", "64 tokens, T = 64"]

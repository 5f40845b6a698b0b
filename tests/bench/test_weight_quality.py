"""`mdn bench quality`: held-out bits per byte in every format; the tables of docs/cpu-inference.md are the recorded
ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mdn.bench.cpu_tables import PAGE, RESULTS, fill
from mdn.cli import main
from mdn.common.results import read_results
from mdn.training.run import train
from pages import ROOT
from training_support import tiny_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A trained run and the bits per byte that it found at its end."""
    result = train(tiny_recipe(tmp_path_factory.mktemp("quality")))
    assert result.summary is not None
    return result.run_dir, result.summary["held_out"]["bits_per_byte"]


def test_the_held_out_text_of_the_run_is_measured_in_every_format(run: tuple[Path, float], tmp_path: Path) -> None:
    folder, bits = run
    file = tmp_path / "quality.json"
    assert main(["bench", "quality", str(folder), str(folder / "checkpoint-9"), "--json", str(file)]) == 0
    finished, checkpoint = read_results(file, "weight_quality")["models"]
    assert [row["format"] for row in finished["rows"]] == ["float32", "bf16", "int8", "int4"]
    assert finished["rows"][0]["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    for row in finished["rows"]:
        assert row["change"] == pytest.approx(row["bits_per_byte"] / bits - 1, abs=1e-6)
    assert finished["rows"][1]["change"] == pytest.approx(0, abs=1e-3)
    assert (finished["trained_tokens"], checkpoint["trained_tokens"]) == (12 * 128, 9 * 128)


def test_a_model_without_its_run_is_refused(run: tuple[Path, float], tmp_path: Path, capsys) -> None:
    shutil.copytree(run[0] / "model", tmp_path / "model")
    assert main(["bench", "quality", str(tmp_path / "model")]) == 2
    assert "is not of a training run" in capsys.readouterr().err


def test_the_tables_of_the_docs_are_those_of_the_recorded_results() -> None:
    page = (ROOT / PAGE).read_text()
    assert fill(page, ROOT / RESULTS) == page


def test_recorded_changes_of_bits_per_byte_are_within_their_bars() -> None:
    for model in read_results(ROOT / RESULTS / "weight_quality.json", "weight_quality")["models"]:
        change = {row["format"]: abs(row["change"]) for row in model["rows"]}
        assert change["bf16"] < 0.005
        assert change["int8"] < 0.005
        assert change["int4"] < 0.03

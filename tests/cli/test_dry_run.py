"""`mdn train --dry-run` answers for every mixer and every recipe that we ship, with its words in any order."""

from __future__ import annotations

import pytest

from mdn.cli import main
from mdn.layers import MIXERS
from mdn.training.recipe import packaged_recipes


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_every_mixer_can_be_planned(mixer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", f"model.mixer={mixer}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"mixer: {mixer}" in printed
    assert "parameters   " in printed


@pytest.mark.parametrize("recipe", packaged_recipes())
def test_every_shipped_recipe_can_be_planned(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "--dry-run", "--nodes", "4"]) == 0
    assert f"mdn train {recipe}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "demo training.steps=3 seed=7 --dry-run --nodes 2",
        "demo --dry-run --nodes 2 training.steps=3 seed=7",
        "demo training.steps=3 --dry-run seed=7 --nodes 2",
        "--nodes 2 --dry-run demo training.steps=3 seed=7",
    ],
)
def test_overrides_and_options_stand_in_any_order(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "--nnodes 2" in printed
    assert printed.rstrip().endswith("mdn train demo training.steps=3 seed=7")


def test_a_key_of_a_grid_may_follow_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mqar", "quick", "--list", "seeds=[5]", "mixers=[kda]"]) == 0
    cells = capsys.readouterr().out.splitlines()
    assert cells
    assert all("kda" in cell and cell.endswith("seed5") for cell in cells)


def test_a_missing_word_is_asked_for_and_an_optional_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mqar", "--list"]) == 2
    assert capsys.readouterr().err == (
        "mdn: error: the following arguments are required: recipe; see `mdn mqar --help`\n"
    )

"""`mdn train --dry-run` answers for every mixer and every recipe that we ship."""

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

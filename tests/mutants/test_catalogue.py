"""Every mutant can still be seeded: its text is in the code, once. `make mutants` shows that each is killed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
OPS = FOLDER.parents[1] / "src" / "mdn" / "ops"
MUTANTS = runpy.run_path(str(FOLDER / "catalogue.py"))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_text_of_a_mutant_is_in_the_code_once(mutant):
    found = (OPS / mutant.file).read_text().count(mutant.old)
    assert found == 1, f"the code was rewritten: seed the same fault anew (found {found} times)"
    assert mutant.old != mutant.new


def test_every_backend_has_mutants():
    assert {mutant.backend for mutant in MUTANTS} == {"torch", "cpu", "recurrent", "triton"}
    assert len(MUTANTS) >= 40

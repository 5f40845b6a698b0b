"""The kernel passes the conformance suite with every instruction set that this processor has."""

from __future__ import annotations

import pytest

from conformance import run_suite
from mdn.ops import cpu
from mdn.ops.cpu.bindings import INSTRUCTION_SETS

pytestmark = pytest.mark.native


ORDER = INSTRUCTION_SETS[::-1]
"""from the one that every processor has"""


@pytest.mark.parametrize("instruction_set", ORDER)
def test_every_instruction_set_passes_the_conformance_suite(instruction_set: str, monkeypatch) -> None:
    best = cpu.instruction_set()
    assert best is not None, cpu.why_unavailable()
    if ORDER.index(instruction_set) > ORDER.index(best):
        pytest.skip(f"this processor has no {instruction_set}")
    if instruction_set == best:
        pytest.skip("the best one is what tests/ops/test_conformance.py runs with")
    run_suite("cpu", MDN_CPU_ISA=instruction_set)

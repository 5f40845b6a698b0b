"""The kernel passes the conformance suite with every instruction set that this processor has."""

from __future__ import annotations

import pytest

from conformance import run_suite
from mdn.ops import cpu

pytestmark = pytest.mark.native


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_passes_the_conformance_suite(instruction_set: str, monkeypatch) -> None:
    order = ["baseline", "avx2", "avx512"]
    best = cpu.instruction_set()
    assert best is not None, cpu.why_unavailable()
    if order.index(instruction_set) > order.index(best):
        pytest.skip(f"this processor has no {instruction_set}")
    if instruction_set == best:
        pytest.skip("the best one is what tests/ops/test_conformance.py runs with")
    run_suite("cpu", MDN_CPU_ISA=instruction_set)

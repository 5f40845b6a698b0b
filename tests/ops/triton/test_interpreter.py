"""Triton's interpreter, repaired to take bfloat16 and TF32 as the hardware takes them."""

from __future__ import annotations

import pytest

from triton_interpreted import run_interpreted


@pytest.fixture(scope="module")
def repaired_operations():
    return run_interpreted("interpreter_checks.py")


@pytest.mark.parametrize("operation", ["add", "multiply", "negate", "sum", "cumsum", "dot", "round", "compare"])
def test_the_repaired_interpreter_agrees_with_torch_on_bfloat16(repaired_operations, operation):
    assert repaired_operations["bfloat16"][operation] == 0.0


def test_the_interpreter_as_shipped_is_wrong_on_bfloat16_so_the_repair_is_needed(repaired_operations):
    assert repaired_operations["as shipped"]["dot"] > 1.0


def test_emulated_tf32_loses_13_bits_and_three_products_win_them_back(repaired_operations):
    errors = repaired_operations["float32 dot"]
    assert 1e-5 < errors["tf32"] < 2e-3
    assert errors["tf32x3"] < 2e-6
    assert errors["ieee"] < 2e-6


def test_tf32_rounding_is_to_the_nearest_with_ties_away_from_zero(repaired_operations):
    assert repaired_operations["tf32 rounding"]


def test_written_bytes_count_only_unmasked_elements(repaired_operations):
    assert repaired_operations["written bytes"] == 100 * 2

"""The kernels against the float64 recurrence, under Triton's interpreter (see cases.py)."""

from __future__ import annotations

import pytest
from interpreted import run_interpreted

FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12
# A kernel rounds a few operands in a row (states, residual, scores); each costs about one unit of the budget.
ROUNDINGS_IN_A_ROW = 6


@pytest.fixture(scope="module")
def results():
    """One process for all float32 groups: starting Triton costs more than a small case."""
    groups = ("hostile_gates", "constant_momentum", "several_chunks", "packs", "strong_coupling", "decoding")
    return run_interpreted("cases.py", *groups)


def assert_all_below(cases, tolerance):
    assert cases
    too_large = {
        (case, name): error for case, errors in cases.items() for name, error in errors.items() if error > tolerance
    }
    assert not too_large


def test_outputs_and_all_gradients_are_exact_for_hostile_gates(results):
    names = {"o", "final_state", "dq", "dk", "dv", "dlog_alpha", "dlog_mu", "dbeta", "deta", "dinitial_state"}
    assert names <= set(results["hostile_gates"]["grouped heads, two chunks and a bit"])
    assert "dp" in results["hostile_gates"]["given p, shorter than a chunk"]
    assert_all_below(results["hostile_gates"], FLOAT32_TOLERANCE)


def test_every_constant_log_mu_from_zero_to_minus_infinity_is_exact(results):
    assert_all_below(results["constant_momentum"], FLOAT32_TOLERANCE)


def test_what_a_chunk_hands_to_the_next_is_exact(results):
    assert_all_below(results["several_chunks"], FLOAT32_TOLERANCE)


def test_packs_with_empty_and_one_token_sequences_are_exact(results):
    assert_all_below(results["packs"], FLOAT32_TOLERANCE)


def test_the_triangular_inverse_keeps_its_digits_for_equal_keys_and_open_gates(results):
    (errors,) = results["strong_coupling"].values()
    assert errors["o"] < FLOAT32_TOLERANCE
    assert errors["final_state"] < FLOAT32_TOLERANCE
    # An undamped oscillator: its gradients are small differences of terms 64 times as large.
    assert_all_below(results["strong_coupling"], 10 * FLOAT32_TOLERANCE)


def test_a_decoding_step_updates_its_slots_in_place_and_no_others(results):
    assert_all_below(results["decoding"], FLOAT32_TOLERANCE)


def test_float64_inputs_are_computed_in_float64():
    assert_all_below(run_interpreted("cases.py", "double_precision")["double_precision"], FLOAT64_TOLERANCE)

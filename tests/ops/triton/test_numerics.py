"""The kernels against the float64 recurrence, under Triton's interpreter (see cases.py)."""

from __future__ import annotations

import pytest

from triton_interpreted import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_all_below, run_interpreted


@pytest.fixture(scope="module")
def results():
    """One process for all float32 groups: starting Triton costs more than a small case."""
    groups = ("hostile_gates", "constant_momentum", "several_chunks", "packs", "decoding")
    return run_interpreted("cases.py", *groups, "strong_coupling", "rounded_inverse", "repeated_key")


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


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_equal_keys_and_open_gates_lose_hardly_more_than_the_float32_recurrence(results, chunk_size):
    # In units of the float32 recurrence's own error. A chunk sums terms with weights up to C / 2, and they cancel.
    assert_all_below({chunk_size: results["strong_coupling"][str(chunk_size)]}, 1 + chunk_size / 8)


def test_refinement_repairs_a_stored_inverse_that_was_rounded_to_float32(results):
    assert_all_below({"float64": results["rounded_inverse"]["float64"]}, FLOAT64_TOLERANCE)
    assert_all_below({"rounded": results["rounded_inverse"]["inverse rounded"]}, 1e-9)


def test_one_repeated_key_and_hardly_damped_gates_lose_no_more_than_substitution(results):
    lost = results["repeated_key"]
    assert lost["16"]["o"] <= 10 * lost["float32 recurrence"]["o"]
    assert lost["64"]["o"] <= lost["substitution"]["o"]


def test_a_decoding_step_updates_its_slots_in_place_and_no_others(results):
    assert_all_below(results["decoding"], FLOAT32_TOLERANCE)


def test_float64_inputs_are_computed_in_float64():
    assert_all_below(run_interpreted("cases.py", "double_precision")["double_precision"], FLOAT64_TOLERANCE)

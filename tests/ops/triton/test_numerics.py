"""Keys that come again, slots that do not exist, tokens that are not finite, and calls without outputs, under the
interpreter (cases.py).

The rest of what they compute: test_conformance.py.
"""

from __future__ import annotations

import pytest

from triton_interpreted import run_interpreted

FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def results():
    """One process for all groups: starting Triton costs more than a small case."""
    groups = ("strong_coupling", "rounded_inverse", "repeated_key", "absent_slots", "states_only", "damaged_tokens")
    return run_interpreted("cases.py", *groups, "other_gpus")


def assert_all_below(cases, tolerance):
    assert cases
    pairs = [(case, name, error) for case, errors in cases.items() for name, error in errors.items()]
    assert not [pair for pair in pairs if not pair[-1] <= tolerance]


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_equal_keys_and_open_gates_lose_hardly_more_than_the_float32_recurrence(results, chunk_size):
    # In units of the float32 recurrence's own error. A chunk sums terms with weights up to C / 2, and they cancel.
    assert_all_below({chunk_size: results["strong_coupling"][str(chunk_size)]}, 1 + chunk_size / 8)


def test_refinement_repairs_a_stored_inverse_that_was_rounded_to_float32(results):
    assert_all_below({"float64": results["rounded_inverse"]["float64"]}, FLOAT64_TOLERANCE)
    assert_all_below({"rounded": results["rounded_inverse"]["inverse rounded"]}, 1e-9)


def test_one_repeated_key_and_hardly_damped_gates_lose_hardly_more_than_substitution(results):
    lost = results["repeated_key"]
    assert lost["16"]["o"] <= 10 * lost["float32 recurrence"]["o"]
    # Both are sums of rounding errors, and processors round products differently: 0.5 to 1.2 times have been seen.
    assert lost["64"]["o"] <= 2 * lost["substitution"]["o"]


def test_rows_whose_slot_does_not_exist_give_zeros_and_change_nothing(results):
    assert_all_below(results["absent_slots"], FLOAT32_TOLERANCE)


def test_states_without_outputs_are_those_of_the_whole_pass(results):
    assert_all_below(results["states_only"], 0.0)


def test_a_token_that_is_not_finite_reaches_later_outputs_and_nothing_else(results):
    assert_all_below(results["damaged_tokens"], 0)


@pytest.mark.parametrize("target", ["sm_90", "sm_86"])
def test_what_is_computed_differently_on_other_gpus_is_as_exact(results, target):
    assert_all_below({target: results["other_gpus"][target]}, FLOAT32_TOLERANCE)

"""Everything on the GPU path through the public functions, under Triton's interpreter (see public_cases.py)."""

from __future__ import annotations

import pytest

from triton_interpreted import run_interpreted


@pytest.fixture(scope="module")
def results():
    groups = ("ops", "differing", "layer", "program_order", "custom_ops", "float16_range")
    return run_interpreted("public_cases.py", *groups)


def above(bar, errors):
    """The names of errors that are not at or below the bar; NaN is not."""
    assert errors
    return {name for name, error in errors.items() if not error <= bar}


def test_every_op_agrees_with_torch_when_auto_is_forced_to_triton(results):
    assert above(1e-4, results["ops"]) == set()


def test_the_comparison_finds_a_wrong_last_number_nan_and_a_backend_compared_with_itself(results):
    assert above(1e-4, results["differing"]) == {"another number", "NaN", "Triton twice", "torch twice"}


def test_the_layer_agrees_with_torch_forward_and_backward(results):
    assert above(1e-3, results["layer"]) == set()


def test_results_do_not_depend_on_the_order_of_programs(results):
    calls = ("chunk", "pack", "decode step")
    assert results["program_order"] == {f"{call}, {order}": 0 for call in calls for order in ("reversed", "shuffled")}


def test_custom_ops_keep_their_promises_for_transposed_expanded_and_empty_inputs(results):
    kinds = ("contiguous", "transposed", "expanded", "empty", "general, transposed", "general, empty")
    assert results["custom_ops"] == {f"{op}, {kind}": 0 for kind in kinds for op in ("forward", "backward", "step")}


def test_float16_chunk_states_cannot_overflow(results):
    assert above(1e-2, results["float16_range"]) == set()


def test_a_model_trains_and_generates_with_padding_and_packing():
    found = run_interpreted("public_cases.py", "model")["model"]
    assert above(0.0, {"generate": found.pop("generate with padding")}) == set()
    assert above(1e-3, found) == set()

"""Everything on the GPU path through the public functions, under Triton's interpreter (see public_cases.py)."""

from __future__ import annotations

import pytest

from triton_interpreted import run_interpreted


@pytest.fixture(scope="module")
def results():
    return run_interpreted("public_cases.py", "ops", "layer", "program_order", "custom_ops", "float16_range")


def test_every_op_agrees_with_torch_when_auto_is_forced_to_triton(results):
    assert {name for name, error in results["ops"].items() if error > 1e-4} == set()


def test_the_layer_agrees_with_torch_forward_and_backward(results):
    assert results["layer"]["layer, forward and backward"] < 1e-3


def test_results_do_not_depend_on_the_order_of_programs(results):
    assert results["program_order"] == {"reversed": 0.0, "shuffled": 0.0}


def test_custom_ops_keep_their_promises_for_transposed_expanded_and_empty_inputs(results):
    assert {name for name, complaints in results["custom_ops"].items() if complaints} == set()


def test_float16_chunk_states_cannot_overflow(results):
    assert {name for name, error in results["float16_range"].items() if error > 1e-2} == set()


def test_a_model_trains_and_generates_with_padding_and_packing():
    found = run_interpreted("public_cases.py", "model")["model"]
    assert found["padded batch, forward and backward"] < 1e-3
    assert found["pack"] < 1e-3
    assert found["generate with padding"] == 0.0

"""One token at a time: prefill and decode, forms of the state, and the lean form for short inputs.

Steps, slots and precisions on every backend: test_conformance.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance import OUTPUT_BAR, torch_chunk
from definition import Tensors, converted, make_inputs, momentum_delta_rule, relative_error
from mdn.ops import chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule, momentum_delta_step


def step(inputs: Tensors, t: int, state: Tensor | tuple[Tensor, Tensor], **options) -> Tensor:
    token = {"p": None} | {name: x[:, t] for name, x in inputs.items() if name != "initial_state"}
    return momentum_delta_step(**token, state=state, **options)


def test_prefill_by_chunks_then_decode_by_steps_is_the_whole_sequence() -> None:
    inputs = make_inputs(T=90, dtype=torch.float64)
    whole, _ = torch_chunk(inputs)
    prompt = {name: x if name == "initial_state" else x[:, :67] for name, x in inputs.items()}
    _, state = torch_chunk(prompt)
    for t in range(67, 90):
        assert relative_error(step(inputs, t, state), whole[:, t]) <= 1e-13


def test_the_step_keeps_scale_and_switches() -> None:
    inputs = make_inputs(T=3, with_p=True, dtype=torch.float64)
    inputs |= {name: 0.2 * inputs[name] for name in ("q", "k", "p")}
    state = inputs["initial_state"].clone()
    expected, _ = momentum_delta_rule(**inputs, scale=0.3, l2norm=False, p_times_alpha=False)
    for t in range(3):
        o = step(inputs, t, state, scale=0.3, use_qk_l2norm_in_kernel=False, use_p_times_alpha=False)
        assert relative_error(o, expected[:, t]) <= 1e-13


def test_the_state_may_be_a_pair_or_a_strided_view_of_a_larger_pool() -> None:
    inputs = make_inputs(T=1)
    together = inputs["initial_state"].clone()
    expected = step(inputs, 0, together)
    layers = torch.zeros(2, 5, 2, 2, 16, 24).transpose(0, 1)  # [layer, S or M, slots, HV, K, V]
    layers[3] = inputs["initial_state"]
    assert torch.equal(step(inputs, 0, layers[3]), expected)
    assert torch.equal(layers[3], together)
    assert not layers[[0, 1, 2, 4]].any()
    S, M = inputs["initial_state"].clone()
    assert torch.equal(step(inputs, 0, (S, M)), expected)
    assert torch.equal(torch.stack([S, M]), together)


@pytest.mark.native
@pytest.mark.parametrize("which", ["S", "M", "both"])
def test_a_transposed_state_is_updated_by_torch_and_refused_for_the_kernel(which: str) -> None:
    inputs = make_inputs(T=1)
    plain = inputs["initial_state"].clone()
    expected = step(inputs, 0, plain)
    S, M = (x.mT.contiguous().mT if which in (name, "both") else x for name, x in zip("SM", inputs["initial_state"]))
    with pytest.raises(ValueError, match="backend='cpu' needs a state that is contiguous in its last dimension, got"):
        step(inputs, 0, (S, M), backend="cpu")
    torch.testing.assert_close(step(inputs, 0, (S, M)), expected)
    torch.testing.assert_close(torch.stack([S, M]), plain)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("T", [1, 2, 8, 9, 40])
def test_the_lean_form_is_the_definition_at_every_length(T: int, backend: str) -> None:
    inputs = make_inputs(T=T, HV=4, with_p=True)
    kept = inputs["initial_state"].clone()
    found = fused_recurrent_momentum_delta_rule(**inputs, output_final_state=True, backend=backend)
    for actual, expected in zip(found, momentum_delta_rule(**converted(inputs, torch.float64))):
        assert relative_error(actual, expected) <= OUTPUT_BAR
    assert torch.equal(inputs["initial_state"], kept)


def test_the_lean_form_without_initial_state_starts_at_zero() -> None:
    inputs = make_inputs(T=6, with_state=False)
    found = fused_recurrent_momentum_delta_rule(**inputs, output_final_state=True, backend="torch")
    for actual, expected in zip(found, chunk_momentum_delta_rule(**inputs, output_final_state=True, backend="torch")):
        assert relative_error(actual, expected) <= OUTPUT_BAR
    assert fused_recurrent_momentum_delta_rule(**inputs)[1] is None

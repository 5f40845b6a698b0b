"""One token at a time: the decode step, its slots, and the lean form for short inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mdn.ops import chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule, momentum_delta_step
from momentum_cases import OUTPUT_BAR, Inputs, make_inputs, recurrence, relative_error, torch_chunk

STEP_INPUTS = ("q", "k", "v", "p", "log_alpha", "log_mu", "beta", "eta")


def step(inputs: Inputs, t: int, state: Tensor | tuple[Tensor, Tensor], **options) -> Tensor:
    token = {name: inputs[name][:, t] if name in inputs else None for name in STEP_INPUTS}
    return momentum_delta_step(**token, state=state, **options)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("with_p", [True, False])
def test_step_by_step_is_the_chunk_form(backend: str, with_p: bool) -> None:
    inputs = make_inputs(T=70, HV=4, with_p=with_p)
    state = inputs["initial_state"].clone()
    o = torch.stack([step(inputs, t, state, backend=backend) for t in range(70)], dim=1)
    wanted_o, wanted_state = recurrence(**{name: x.double() for name, x in inputs.items()})
    chunk_o, chunk_state = torch_chunk(inputs)
    for found in (o, chunk_o):
        assert relative_error(found, wanted_o) <= OUTPUT_BAR
    for found in (state, chunk_state):
        assert relative_error(found, wanted_state) <= OUTPUT_BAR


def test_prefill_by_chunks_then_decode_by_steps_is_the_whole_sequence() -> None:
    inputs = make_inputs(T=90, dtype=torch.float64)
    whole, _ = torch_chunk(inputs)
    prompt = {name: x if name == "initial_state" else x[:, :67] for name, x in inputs.items()}
    _, state = torch_chunk(prompt)
    for t in range(67, 90):
        assert relative_error(step(inputs, t, state), whole[:, t]) <= 1e-13


def test_the_step_keeps_scale_and_switches() -> None:
    inputs = make_inputs(T=3, with_p=True, dtype=torch.float64)
    for name in ("q", "k", "p"):
        inputs[name] = 0.2 * inputs[name]
    state = inputs["initial_state"].clone()
    wanted, _ = recurrence(**inputs, scale=0.3, normalise=False, decay_p=False)
    for t in range(3):
        o = step(inputs, t, state, scale=0.3, use_qk_l2norm_in_kernel=False, use_p_times_alpha=False)
        assert relative_error(o, wanted[:, t]) <= 1e-13


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_slots_are_found_through_state_indices_and_others_are_left_alone(backend: str) -> None:
    inputs = make_inputs(B=3, T=4)
    pool = torch.randn(2, 8, 2, 16, 24, generator=torch.Generator().manual_seed(4))
    slots = torch.tensor([6, 0, 3])
    pool[:, slots] = inputs["initial_state"]
    before = pool.clone()
    for t in range(4):
        direct = inputs["initial_state"]
        wanted = step(inputs, t, direct, backend="torch")
        assert relative_error(step(inputs, t, pool, state_indices=slots, backend=backend), wanted) <= OUTPUT_BAR
    assert relative_error(pool[:, slots], inputs["initial_state"]) <= OUTPUT_BAR
    others = [1, 2, 4, 5, 7]
    assert torch.equal(pool[:, others], before[:, others])


def test_state_indices_may_be_int32() -> None:
    inputs = make_inputs(B=2, T=1, dtype=torch.float64)
    first, second = inputs["initial_state"].clone(), inputs["initial_state"].clone()
    for state, dtype in ((first, torch.int32), (second, torch.int64)):
        step(inputs, 0, state, state_indices=torch.tensor([1, 0], dtype=dtype))
    assert torch.equal(first, second)


def test_the_state_may_be_a_pair_or_a_strided_view_of_a_larger_pool() -> None:
    inputs = make_inputs(T=1)
    together = inputs["initial_state"].clone()
    wanted = step(inputs, 0, together)
    layers = torch.zeros(2, 5, 2, 2, 16, 24).transpose(0, 1)  # [layer, S or M, slots, HV, K, V]
    layers[3] = inputs["initial_state"]
    assert torch.equal(step(inputs, 0, layers[3]), wanted)
    assert torch.equal(layers[3], together)
    assert not layers[[0, 1, 2, 4]].any()
    S, M = inputs["initial_state"].clone()
    assert torch.equal(step(inputs, 0, (S, M)), wanted)
    assert torch.equal(torch.stack([S, M]), together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tokens_keep_a_float32_state(dtype: torch.dtype) -> None:
    inputs = make_inputs(T=40, dtype=dtype)
    state = inputs["initial_state"].clone()
    o = torch.stack([step(inputs, t, state) for t in range(40)], dim=1)
    wanted_o, wanted_state = recurrence(**{name: x.double() for name, x in inputs.items()})
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    assert relative_error(o, wanted_o) <= 1.01 * torch.finfo(dtype).eps / 2
    assert relative_error(state, wanted_state) <= OUTPUT_BAR


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("T", [1, 2, 8, 9, 40])
def test_the_lean_form_is_the_chunk_form_at_every_length(T: int, backend: str) -> None:
    inputs = make_inputs(T=T, HV=4, with_p=True)
    kept = inputs["initial_state"].clone()
    found = fused_recurrent_momentum_delta_rule(**inputs, output_final_state=True, backend=backend)
    for result, want in zip(found, recurrence(**{name: x.double() for name, x in inputs.items()})):
        assert relative_error(result, want) <= OUTPUT_BAR
    assert torch.equal(inputs["initial_state"], kept)


def test_the_lean_form_without_initial_state_starts_at_zero() -> None:
    inputs = make_inputs(T=6, with_state=False)
    found = fused_recurrent_momentum_delta_rule(**inputs, output_final_state=True, backend="torch")
    for result, want in zip(found, chunk_momentum_delta_rule(**inputs, output_final_state=True, backend="torch")):
        assert relative_error(result, want) <= OUTPUT_BAR
    assert fused_recurrent_momentum_delta_rule(**inputs)[1] is None

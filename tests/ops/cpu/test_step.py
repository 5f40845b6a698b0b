"""The native decode step: one token, the states updated in place."""

from __future__ import annotations

import pytest
import torch

from cpu_cases import OUTPUT_ERROR, Inputs, definition, error, make_inputs, options_for, with_hostile_gates
from mdn.ops import cpu
from mdn.ops.momentum.interface import RuleTensors, StepState


def token(inputs: Inputs, t: int) -> RuleTensors:
    """q, k, v, p and the gates of one token."""
    return RuleTensors(*(None if x is None else x[:, t] for x in inputs.as_tuple().of_tokens))


def decode(inputs: Inputs, S: torch.Tensor, M: torch.Tensor, **options) -> torch.Tensor:
    settings = options_for(inputs, **options)
    steps = [cpu.step_(token(inputs, t), StepState(S, M, None), settings) for t in range(inputs.q.shape[1])]
    return torch.stack(steps, 1)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (20, 24), (5, 3), (128, 256)])
@pytest.mark.parametrize("with_p", [False, True])
def test_steps_match_the_definition(key_dim: int, value_dim: int, with_p: bool) -> None:
    inputs = make_inputs(batch=3, time=12, heads=2, value_heads=4, key_dim=key_dim, value_dim=value_dim, with_p=with_p)
    S, M = inputs.initial_state.clone()
    o = decode(inputs, S, M)
    wanted, states = definition(inputs.converted(torch.float64), options_for(inputs))
    assert error(o, wanted) <= OUTPUT_ERROR
    assert error(torch.stack([S, M]), states) <= OUTPUT_ERROR


def test_hostile_gates_are_exact_step_by_step() -> None:
    inputs = with_hostile_gates(make_inputs(batch=2, time=40))
    S, M = inputs.initial_state.clone()
    o = decode(inputs, S, M)
    wanted, states = definition(inputs.converted(torch.float64), options_for(inputs))
    assert error(o, wanted) <= OUTPUT_ERROR
    assert error(torch.stack([S, M]), states) <= OUTPUT_ERROR


def test_steps_continue_a_chunkwise_prefill() -> None:
    inputs = make_inputs(batch=2, time=70)
    options = options_for(inputs)
    prefix = Inputs(*(None if x is None else x[:, :50] for x in inputs.as_tuple().of_tokens), inputs.initial_state)
    rest = Inputs(*(None if x is None else x[:, 50:] for x in inputs.as_tuple().of_tokens), None)
    _, (S, M), _ = cpu.forward(prefix.as_tuple(), None, options, False)
    o = decode(rest, S, M)
    wanted, _ = definition(inputs.converted(torch.float64), options)
    assert error(o, wanted[:, 50:]) <= OUTPUT_ERROR


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_only_the_named_slots_change(dtype: torch.dtype) -> None:
    inputs = make_inputs(batch=2, time=1)
    slots = torch.tensor([4, 1], dtype=dtype)
    pool = torch.randn(2, 6, 2, 32, 48, generator=torch.Generator().manual_seed(7))
    before = pool.clone()
    direct = pool[:, [4, 1]].clone()
    o = cpu.step_(token(inputs, 0), StepState(pool[0], pool[1], slots), options_for(inputs))
    wanted = cpu.step_(token(inputs, 0), StepState(direct[0], direct[1], None), options_for(inputs))
    assert torch.equal(o, wanted)
    assert torch.equal(pool[:, [4, 1]], direct)
    assert torch.equal(pool[:, [0, 2, 3, 5]], before[:, [0, 2, 3, 5]])


@pytest.mark.parametrize("slot", [-1, 6, 1 << 40])
def test_a_slot_out_of_range_is_refused_and_nothing_changes(slot: int) -> None:
    inputs = make_inputs(batch=2, time=1)
    pool = torch.ones(2, 6, 2, 32, 48)
    with pytest.raises(ValueError, match="state_indices"):
        cpu.step_(token(inputs, 0), StepState(pool[0], pool[1], torch.tensor([0, slot])), options_for(inputs))
    assert torch.equal(pool, torch.ones_like(pool))


def test_states_may_have_any_strides_with_a_contiguous_last_dimension() -> None:
    inputs = make_inputs(batch=2, time=3)
    S, M = inputs.initial_state.clone()
    wanted = decode(inputs, S, M)
    wide = torch.zeros(32, 2, 2, 2, 64)  # [K, N, 2, HV, V and more]
    views = [wide[:, :, i, :, :48].permute(1, 2, 0, 3) for i in range(2)]
    for view, start in zip(views, inputs.initial_state, strict=True):
        view.copy_(start)
    assert torch.equal(decode(inputs, *views), wanted)
    assert torch.equal(views[0], S)
    assert torch.equal(views[1], M)
    assert not wide[..., 48:].any()


@pytest.mark.parametrize("change", [lambda S: S.transpose(-1, -2), lambda S: S.double(), lambda S: S[:, :1]])
def test_states_that_cannot_be_updated_in_place_are_refused(change) -> None:
    inputs = make_inputs(batch=2, time=1, key_dim=48)
    S, M = inputs.initial_state.clone()
    with pytest.raises(ValueError, match=r"^S must"):
        cpu.step_(token(inputs, 0), StepState(change(S), M, None), options_for(inputs))


def test_bfloat16_steps_keep_float32_states() -> None:
    inputs = make_inputs(batch=2, time=6, key_dim=20, value_dim=24, with_p=True)
    rounded = Inputs(*(x.bfloat16() if x.dim() == 4 else x for x in inputs.as_tuple()))
    S, M = inputs.initial_state.clone()
    o = decode(rounded, S, M)
    wanted, states = definition(rounded.converted(torch.float64), options_for(inputs))
    assert o.dtype == torch.bfloat16
    assert error(o, wanted) <= 2.0**-8
    assert error(torch.stack([S, M]), states) <= OUTPUT_ERROR


def test_several_threads_give_the_same_step() -> None:
    inputs = make_inputs(batch=4, time=2, heads=4, key_dim=64, value_dim=64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            S, M = inputs.initial_state.clone()
            results.append((decode(inputs, S, M), S, M))
    finally:
        torch.set_num_threads(before)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)

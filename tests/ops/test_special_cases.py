"""What the momentum delta rule becomes for special gates, each written here on its own; and forms that must agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mdn.ops import blockwise_momentum_delta_rule, chunk_momentum_delta_rule, recurrent_momentum_delta_rule
from momentum_cases import (
    HARD_ZERO,
    Inputs,
    leaves,
    make_inputs,
    only_tokens,
    recurrence,
    relative_error,
    torch_chunk,
    unit,
)

EXACT = 1e-13


def first_order(**changes: float) -> Inputs:
    """float64 inputs with mu = 0 and eta = 1: the momentum is the last write alone. beta in (0, 1)."""
    inputs = make_inputs(T=90, with_state=False, dtype=torch.float64)
    inputs |= {"log_mu": torch.full_like(inputs["log_mu"], HARD_ZERO), "eta": torch.ones_like(inputs["eta"])}
    return inputs | {name: torch.full_like(inputs[name], value) for name, value in changes.items()}


def outputs_of(states: list[Tensor], q: Tensor) -> Tensor:
    return (
        torch.stack([torch.einsum("bhkv,bhk->bhv", S, q[:, t]) for t, S in enumerate(states)], 1) * q.shape[-1] ** -0.5
    )


def transition_states(inputs: Inputs, forget_along_key: bool) -> list[Tensor]:
    """S_t = alpha (I - beta k k^T) S + beta k v^T, or without the forgetting: the published first-order rules."""
    k, v, alpha, beta = unit(inputs["k"]), inputs["v"], inputs["log_alpha"].exp(), inputs["beta"]
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    states = []
    for t in range(v.shape[1]):
        key, step = k[:, t], beta[:, t, :, None, None]
        outer = torch.einsum("bhk,bhj->bhkj", key, key)
        transition = torch.eye(key.shape[-1], dtype=key.dtype) - step * outer * forget_along_key
        S = alpha[:, t, :, None, None] * transition @ S + step * torch.einsum("bhk,bhv->bhkv", key, v[:, t])
        states.append(S)
    return states


def test_without_momentum_it_is_gated_deltanet() -> None:
    inputs = first_order()
    wanted = outputs_of(transition_states(inputs, forget_along_key=True), unit(inputs["q"]))
    assert relative_error(torch_chunk(inputs)[0], wanted) <= EXACT


def test_without_momentum_and_decay_it_is_deltanet() -> None:
    inputs = first_order(log_alpha=0.0)
    wanted = outputs_of(transition_states(inputs, forget_along_key=True), unit(inputs["q"]))
    assert relative_error(torch_chunk(inputs)[0], wanted) <= EXACT


@pytest.mark.parametrize("decays", [True, False], ids=["scalar decay", "vanilla linear attention"])
def test_without_momentum_and_probe_it_is_linear_attention(decays: bool) -> None:
    """Written as masked attention, (Q K^T * decay) V, not as a recurrence."""
    inputs = first_order() if decays else first_order(log_alpha=0.0)
    inputs["p"] = torch.zeros_like(inputs["k"])
    q, k, v = (x.transpose(1, 2) for x in (unit(inputs["q"]), unit(inputs["k"]), inputs["v"]))
    total = inputs["log_alpha"].cumsum(1).transpose(1, 2)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril() * inputs["beta"].transpose(1, 2).unsqueeze(
        -2
    )
    wanted = ((q @ k.mT) * decay @ v * q.shape[-1] ** -0.5).transpose(1, 2)
    assert relative_error(torch_chunk(inputs)[0], wanted) <= EXACT


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 16, 31, 64, 100, 128, 255, 256])
def test_the_result_does_not_depend_on_the_chunk_size(chunk_size: int) -> None:
    inputs = make_inputs(B=1, T=270, H=1, K=128, V=8, dtype=torch.float64)
    wanted = recurrence(**inputs)
    for found, want in zip(torch_chunk(inputs, chunk_size=chunk_size), wanted):
        assert relative_error(found, want) <= EXACT


@pytest.mark.parametrize("cuts", [(1,), (64,), (65, 66), (10, 74, 138)])
def test_segments_with_states_passed_on_are_the_whole_sequence(cuts: tuple[int, ...]) -> None:
    inputs = make_inputs(T=200, dtype=torch.float64)
    wanted_o, wanted_state = torch_chunk(inputs)
    state, outputs = inputs["initial_state"], []
    for start, end in zip((0, *cuts), (*cuts, 200)):
        o, state = torch_chunk(only_tokens(inputs, start, end) | {"initial_state": state})
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), wanted_o) <= EXACT
    assert relative_error(state, wanted_state) <= EXACT


def test_gradients_flow_from_segment_to_segment_as_through_the_whole() -> None:
    inputs = make_inputs(T=100, dtype=torch.float64)
    k, first_state = inputs["k"].clone().requires_grad_(), inputs["initial_state"].clone().requires_grad_()
    inputs |= {"k": k, "initial_state": first_state}
    wanted = torch.autograd.grad(torch_chunk(inputs)[0].square().sum(), (k, first_state))
    head, state = torch_chunk(only_tokens(inputs, 0, 37) | {"initial_state": first_state})
    tail, _ = torch_chunk(only_tokens(inputs, 37, 100) | {"initial_state": state})
    found = torch.autograd.grad(head.square().sum() + tail.square().sum(), (k, first_state))
    for gradient, want in zip(found, wanted):
        assert relative_error(gradient, want) <= 1e-12


def test_an_empty_segment_returns_its_state() -> None:
    inputs = make_inputs(T=0)
    o, state = torch_chunk(inputs)
    assert o.shape == (2, 0, 2, 24)
    assert torch.equal(state, inputs["initial_state"])


@pytest.mark.parametrize("HV", [4, 6])
def test_grouped_value_heads_share_their_key_head(HV: int) -> None:
    inputs = make_inputs(T=70, H=2, HV=HV, with_p=True, dtype=torch.float64)
    wanted = recurrence(**inputs)
    for found, want in zip(torch_chunk(inputs), wanted):
        assert relative_error(found, want) <= EXACT
    last = {name: x[:, :, -1:] for name, x in inputs.items() if name != "initial_state"}
    last["initial_state"] = inputs["initial_state"][:, :, -1:]
    assert relative_error(torch_chunk(last)[0], wanted[0][:, :, -1:]) <= EXACT


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("decay_p", [True, False])
def test_given_p_scale_and_switches(normalise: bool, decay_p: bool) -> None:
    inputs = make_inputs(T=70, with_p=True, dtype=torch.float64)
    for name in ("q", "k", "p"):
        inputs[name] = 0.2 * inputs[name]
    wanted = recurrence(**inputs, scale=0.3, normalise=normalise, decay_p=decay_p)
    options = {"use_qk_l2norm_in_kernel": normalise, "use_p_times_alpha": decay_p, "scale": 0.3}
    for form in (chunk_momentum_delta_rule, recurrent_momentum_delta_rule):
        for found, want in zip(form(**inputs, **options, output_final_state=True), wanted):
            assert relative_error(found, want) <= EXACT


def test_beta_and_eta_are_ones_and_p_is_k_unless_given() -> None:
    inputs = make_inputs(T=40, dtype=torch.float64)
    del inputs["beta"], inputs["eta"]
    ones = torch.ones_like(inputs["log_mu"])
    wanted = recurrence(**inputs, beta=ones, eta=ones, p=inputs["k"])
    for form in (chunk_momentum_delta_rule, recurrent_momentum_delta_rule, blockwise_momentum_delta_rule):
        extra = {"block_size": 1} if form is blockwise_momentum_delta_rule else {}
        assert relative_error(form(**inputs, **extra)[0], wanted[0]) <= EXACT


def test_the_final_state_comes_only_when_asked_for() -> None:
    inputs = make_inputs(T=10)
    for form in (chunk_momentum_delta_rule, recurrent_momentum_delta_rule, blockwise_momentum_delta_rule):
        assert form(**inputs)[1] is None


def test_the_initial_state_is_not_written_to() -> None:
    inputs = make_inputs(T=10)
    before = inputs["initial_state"].clone()
    torch_chunk(inputs)
    assert torch.equal(inputs["initial_state"], before)


@pytest.mark.parametrize("block_size", [2, 7, 64])
def test_blockwise_takes_every_error_at_the_state_that_began_the_block(block_size: int) -> None:
    inputs = make_inputs(T=40, with_p=True, dtype=torch.float64)
    stepwise = recurrence(**inputs)
    wanted = recurrence(**inputs, block=block_size)
    found = blockwise_momentum_delta_rule(**inputs, output_final_state=True, block_size=block_size)
    for result, want in zip(found, wanted):
        assert relative_error(result, want) <= EXACT
    assert relative_error(found[0], stepwise[0]) > 1e-3


def test_blocks_of_a_pack_are_counted_from_the_start_of_each_sequence() -> None:
    offsets = [0, 5, 5, 6, 20]
    inputs = make_inputs(B=1, T=20, N=4, dtype=torch.float64)
    wanted = recurrence(**inputs, offsets=offsets, block=3)
    found = blockwise_momentum_delta_rule(
        **inputs, cu_seqlens=torch.tensor(offsets), output_final_state=True, block_size=3
    )
    for result, want in zip(found, wanted):
        assert relative_error(result, want) <= EXACT


def test_gradients_of_the_blockwise_form_are_those_of_its_definition() -> None:
    inputs = make_inputs(T=11, HV=4, with_p=True, dtype=torch.float64)
    inputs["log_mu"][:, 3] = float("-inf")
    found, wanted = leaves(inputs), leaves(inputs)
    blockwise_momentum_delta_rule(**found, block_size=4)[0].square().sum().backward()
    recurrence(**wanted, block=4)[0].square().sum().backward()
    for name in found:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, rtol=1e-10, atol=1e-10, msg=name)


def test_blockwise_with_blocks_of_one_is_the_stepwise_chunk_form() -> None:
    inputs = make_inputs(T=80, dtype=torch.float64)
    found = blockwise_momentum_delta_rule(**inputs, output_final_state=True, block_size=1)
    for result, want in zip(found, torch_chunk(inputs)):
        assert relative_error(result, want) <= EXACT


def test_the_definition_of_the_package_is_the_independent_one() -> None:
    inputs = make_inputs(T=50, HV=4, with_p=True, dtype=torch.float64)
    for found, want in zip(recurrent_momentum_delta_rule(**inputs, output_final_state=True), recurrence(**inputs)):
        assert relative_error(found, want) <= EXACT

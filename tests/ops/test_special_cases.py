"""What the momentum rule becomes for special gates, each written here on its own; its blockwise form; defaults."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance import torch_chunk
from definition import HARD_ZERO, Tensors, leaves, make_inputs, momentum_delta_rule, relative_error, unit
from mdn.ops import blockwise_momentum_delta_rule, chunk_momentum_delta_rule, recurrent_momentum_delta_rule

EXACT = 1e-13


def first_order(**changes: float) -> Tensors:
    """float64 inputs with mu = 0 and eta = 1: the momentum is the last write alone. beta in (0, 1)."""
    inputs = make_inputs(T=90, with_state=False, dtype=torch.float64)
    inputs |= {"log_mu": torch.full_like(inputs["log_mu"], HARD_ZERO), "eta": torch.ones_like(inputs["eta"])}
    return inputs | {name: torch.full_like(inputs[name], value) for name, value in changes.items()}


def outputs_of(states: list[Tensor], q: Tensor) -> Tensor:
    reads = [torch.einsum("bhkv,bhk->bhv", S, q[:, t]) for t, S in enumerate(states)]
    return torch.stack(reads, 1) * q.shape[-1] ** -0.5


def transition_states(inputs: Tensors) -> list[Tensor]:
    """S_t = alpha (I - beta k k^T) S + beta k v^T: Gated DeltaNet as published."""
    k, v, alpha, beta = unit(inputs["k"]), inputs["v"], inputs["log_alpha"].exp(), inputs["beta"]
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    states = []
    for t in range(v.shape[1]):
        key, step = k[:, t], beta[:, t, :, None, None]
        transition = torch.eye(key.shape[-1], dtype=key.dtype) - step * torch.einsum("bhk,bhj->bhkj", key, key)
        S = alpha[:, t, :, None, None] * transition @ S + step * torch.einsum("bhk,bhv->bhkv", key, v[:, t])
        states.append(S)
    return states


@pytest.mark.parametrize("decays", [True, False], ids=["gated DeltaNet", "DeltaNet"])
def test_without_momentum_it_is_the_delta_rule(decays: bool) -> None:
    inputs = first_order() if decays else first_order(log_alpha=0.0)
    expected = outputs_of(transition_states(inputs), unit(inputs["q"]))
    assert relative_error(torch_chunk(inputs)[0], expected) <= EXACT


@pytest.mark.parametrize("decays", [True, False], ids=["scalar decay", "vanilla linear attention"])
def test_without_momentum_and_probe_it_is_linear_attention(decays: bool) -> None:
    """Written as masked attention, (Q K^T * decay) V, not as a recurrence."""
    inputs = first_order() if decays else first_order(log_alpha=0.0)
    inputs["p"] = torch.zeros_like(inputs["k"])
    q, k, v = (x.transpose(1, 2) for x in (unit(inputs["q"]), unit(inputs["k"]), inputs["v"]))
    total = inputs["log_alpha"].cumsum(1).transpose(1, 2)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    decay = decay * inputs["beta"].transpose(1, 2).unsqueeze(-2)
    expected = ((q @ k.mT) * decay @ v * q.shape[-1] ** -0.5).transpose(1, 2)
    assert relative_error(torch_chunk(inputs)[0], expected) <= EXACT


def test_beta_and_eta_are_ones_and_p_is_k_unless_given() -> None:
    inputs = make_inputs(T=40, dtype=torch.float64)
    del inputs["beta"], inputs["eta"]
    ones = torch.ones_like(inputs["log_mu"])
    expected = momentum_delta_rule(**inputs, beta=ones, eta=ones, p=inputs["k"])
    for form in (chunk_momentum_delta_rule, recurrent_momentum_delta_rule, blockwise_momentum_delta_rule):
        extra = {"block_size": 1} if form is blockwise_momentum_delta_rule else {}
        assert relative_error(form(**inputs, **extra)[0], expected[0]) <= EXACT


def test_the_final_state_comes_only_when_asked_for() -> None:
    inputs = make_inputs(T=10)
    for form in (chunk_momentum_delta_rule, recurrent_momentum_delta_rule, blockwise_momentum_delta_rule):
        assert form(**inputs)[1] is None


@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_blockwise_takes_every_error_at_the_state_that_began_the_block(block_size: int) -> None:
    inputs = make_inputs(T=40, with_p=True, dtype=torch.float64)
    found = blockwise_momentum_delta_rule(**inputs, output_final_state=True, block_size=block_size)
    for actual, want in zip(found, momentum_delta_rule(**inputs, block_size=block_size)):
        assert relative_error(actual, want) <= EXACT
    if block_size > 1:
        assert relative_error(found[0], momentum_delta_rule(**inputs)[0]) > 1e-3


def test_gradients_of_the_blockwise_form_are_those_of_its_definition() -> None:
    inputs = make_inputs(T=11, HV=4, with_p=True, dtype=torch.float64)
    inputs["log_mu"][:, 3] = HARD_ZERO
    actual, expected = leaves(inputs), leaves(inputs)
    blockwise_momentum_delta_rule(**actual, block_size=4)[0].square().sum().backward()
    momentum_delta_rule(**expected, block_size=4)[0].square().sum().backward()
    for name in actual:
        torch.testing.assert_close(actual[name].grad, expected[name].grad, rtol=1e-10, atol=1e-10, msg=name)

"""What the momentum rule becomes for special gates, each written here on its own; its blockwise form; defaults."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance import torch_chunk
from definition import HARD_ZERO, Tensors, converted, leaves, make_inputs, momentum_delta_rule, relative_error, unit
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


def general(**changes: float | Tensor) -> Tensors:
    """float64 inputs of the rule with a direct write."""
    inputs = make_inputs("general", T=90, with_state=False, dtype=torch.float64)
    filled = {name: torch.full_like(inputs[name], x) for name, x in changes.items() if not isinstance(x, Tensor)}
    return inputs | changes | filled


@pytest.mark.native
def test_a_direct_write_of_zero_changes_nothing_bit_for_bit() -> None:
    inputs = general(direct=0.0)
    without = {name: x for name, x in inputs.items() if name != "direct"}
    for backend, dtype in (("torch", torch.float64), ("cpu", torch.float32)):
        actual, expected = (torch_chunk(converted(x, dtype), backend=backend) for x in (inputs, without))
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


def test_with_a_direct_write_and_no_step_it_is_gated_deltanet_whatever_the_momentum_does() -> None:
    inputs = general(beta=0.0)
    expected = outputs_of(transition_states(inputs | {"beta": inputs["direct"]}), unit(inputs["q"]))
    assert relative_error(torch_chunk(inputs)[0], expected) <= EXACT


@pytest.mark.parametrize("kind", ["nesterov", "quasi-hyperbolic"])
def test_nesterovs_step_and_quasi_hyperbolic_momentum_are_choices_of_the_two_steps(kind: str) -> None:
    """S_t = alpha S - b (mu M_t - eta k r^T), and S_t = alpha S - b (nu M_t - (1 - nu) eta k r^T)."""
    inputs = make_inputs(T=90, with_state=False, dtype=torch.float64)
    k, v, b, eta = unit(inputs["k"]), inputs["v"], inputs["beta"], inputs["eta"]
    alpha, mu = inputs["log_alpha"].exp(), inputs["log_mu"].exp()
    share = mu if kind == "nesterov" else torch.full_like(mu, 0.7)
    plain = torch.ones_like(mu) if kind == "nesterov" else 1 - share
    S = M = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    states = []
    for t in range(v.shape[1]):
        alpha_t, mu_t, b_t, eta_t, share_t, plain_t = (
            x[:, t, :, None, None] for x in (alpha, mu, b, eta, share, plain)
        )
        gradient = -torch.einsum(
            "bhk,bhv->bhkv", k[:, t], v[:, t] - torch.einsum("bhkv,bhk->bhv", alpha_t * S, k[:, t])
        )
        M = mu_t * M + eta_t * gradient
        S = alpha_t * S - b_t * (share_t * M + plain_t * eta_t * gradient)
        states.append(S)
    found = torch_chunk(inputs | {"beta": share * b, "direct": plain * b * eta})
    assert relative_error(found[0], outputs_of(states, unit(inputs["q"]))) <= EXACT


def test_looking_ahead_without_momentum_is_the_rule_itself() -> None:
    inputs = general(log_mu=HARD_ZERO)
    assert relative_error(torch_chunk(inputs, lookahead=True)[0], torch_chunk(inputs)[0]) <= EXACT


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


@pytest.mark.parametrize("rule", ["momentum", "general"])
@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_blockwise_takes_every_error_at_the_state_that_began_the_block(block_size: int, rule: str) -> None:
    inputs = make_inputs(rule, T=40, with_p=True, dtype=torch.float64)
    found = blockwise_momentum_delta_rule(**inputs, output_final_state=True, block_size=block_size)
    for actual, expected in zip(found, momentum_delta_rule(**inputs, block_size=block_size)):
        assert relative_error(actual, expected) <= EXACT
    if block_size > 1:
        assert relative_error(found[0], momentum_delta_rule(**inputs)[0]) > 1e-3


def test_gradients_of_the_blockwise_form_are_those_of_its_definition() -> None:
    inputs = make_inputs("general", T=11, HV=4, with_p=True, dtype=torch.float64)
    inputs["log_mu"][:, 3] = HARD_ZERO
    actual, expected = leaves(inputs), leaves(inputs)
    blockwise_momentum_delta_rule(**actual, block_size=4)[0].square().sum().backward()
    momentum_delta_rule(**expected, block_size=4)[0].square().sum().backward()
    for name in actual:
        torch.testing.assert_close(actual[name].grad, expected[name].grad, rtol=1e-10, atol=1e-10, msg=name)

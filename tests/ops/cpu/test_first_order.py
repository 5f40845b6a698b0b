"""The first-order rules on the native kernel: the same chunkwise form without momentum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cpu_cases import GRADIENT_ERROR, OUTPUT_ERROR, Inputs, error, make_inputs, options_for, pack
from mdn.ops import cpu

RULES = {
    "gated delta": {},
    "comba": {"with_p": True},
    "delta": {"decay": False},
    "scalar decay": {"erase": False, "write": False},
    "linear attention": {"erase": False, "decay": False, "write": False},
}


def definition(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, alpha: Tensor, beta: Tensor, S: Tensor, scale: float, offsets: list[int]
) -> tuple[Tensor, Tensor]:
    """S_t = alpha S + beta k (v - S^T p)^T over the sequences of one row; S is [N, H, K, V]."""
    outputs, states = [], []
    for n, state in enumerate(S):
        for t in range(offsets[n], offsets[n + 1]):
            r = v[0, t] - torch.einsum("hkv,hk->hv", state, p[0, t])
            write = torch.einsum("hk,hv->hkv", beta[0, t][:, None] * k[0, t], r)
            state = alpha[0, t][:, None, None] * state + write
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[0, t]))
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states)


def arguments(inputs: Inputs, decay: bool, write: bool) -> list:
    beta = inputs.beta if write else None
    return [inputs.q, inputs.k, inputs.v, inputs.p, inputs.log_alpha if decay else None, beta, inputs.initial_state[0]]


def expected(given: list, scale: float, p_times_alpha: bool, erase: bool, offsets: list[int]) -> tuple[Tensor, Tensor]:
    q, k, v, p, log_alpha, beta, S = given
    alpha = torch.ones(v.shape[:3], dtype=v.dtype) if log_alpha is None else log_alpha.exp()
    probe = k if p is None else p
    probe = alpha[..., None] * probe if p_times_alpha else probe
    beta = torch.ones_like(alpha) if beta is None else beta
    return definition(q, k, v, probe if erase else 0 * probe, alpha, beta, S, scale, offsets)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[1], [70], [40, 0, 1, 33]])
def test_a_first_order_rule_matches_its_definition(rule: str, lengths: list[int]) -> None:
    settings = {"with_p": False, "decay": True, "erase": True, "write": True} | RULES[rule]
    inputs = make_inputs(time=sum(lengths), sequences=len(lengths), key_dim=20, with_p=settings["with_p"])
    erase, p_times_alpha = settings["erase"], not settings["with_p"]
    inputs.q, inputs.k, inputs.p = (None if x is None else x / 6 for x in (inputs.q, inputs.k, inputs.p))
    options = options_for(inputs, l2norm=False, p_times_alpha=p_times_alpha)
    given = arguments(inputs, settings["decay"], settings["write"])
    leaves = [None if x is None else x.double().requires_grad_() for x in given]
    boundaries = pack(lengths)
    wanted = expected(leaves, options.scale, p_times_alpha, erase, list(boundaries.offsets))
    o, state, residual = cpu.first_order_forward(*given, boundaries, options, True, erase=erase)
    assert error(o, wanted[0]) <= OUTPUT_ERROR
    assert error(state, wanted[1]) <= OUTPUT_ERROR
    grad_o, grad_state = torch.randn(o.shape), torch.randn(state.shape)
    loss = (wanted[0] * grad_o).sum() + (wanted[1] * grad_state).sum()
    gradients = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
    found = cpu.first_order_backward(grad_o, grad_state, *given, residual, boundaries, options, erase=erase)
    for x, gradient in zip(given, found, strict=True):
        assert (x is None) == (gradient is None)
        if x is not None:
            assert error(gradient, next(gradients)) <= GRADIENT_ERROR


@pytest.mark.parametrize("rule", RULES)
def test_first_order_steps_match_the_definition(rule: str) -> None:
    settings = {"with_p": False, "decay": True, "erase": True, "write": True} | RULES[rule]
    inputs = make_inputs(time=9, key_dim=20, value_dim=24, with_p=settings["with_p"])
    inputs.q, inputs.k, inputs.p = (None if x is None else x / 6 for x in (inputs.q, inputs.k, inputs.p))
    erase, p_times_alpha = settings["erase"], not settings["with_p"]
    options = options_for(inputs, l2norm=False, p_times_alpha=p_times_alpha)
    given = arguments(inputs, settings["decay"], settings["write"])
    S = given[-1].clone()
    steps = []
    for t in range(9):
        token = [None if x is None else x[:, t] for x in given[:-1]]
        steps.append(cpu.first_order_step_(*token, S, None, options, erase=erase))
    wanted = expected([None if x is None else x.double() for x in given], options.scale, p_times_alpha, erase, [0, 9])
    assert error(torch.stack(steps, 1), wanted[0]) <= OUTPUT_ERROR
    assert error(S, wanted[1]) <= OUTPUT_ERROR


def test_the_momentum_rule_without_momentum_is_the_gated_delta_rule() -> None:
    inputs = make_inputs(batch=2, time=100, key_dim=64, value_dim=64, with_state=False)
    inputs.log_mu = torch.full_like(inputs.log_mu, float("-inf"))
    inputs.eta = torch.ones_like(inputs.eta)
    options = options_for(inputs)
    o, states, _ = cpu.forward(inputs.as_tuple(), None, options, False)
    given = [inputs.q, inputs.k, inputs.v, None, inputs.log_alpha, inputs.beta, None]
    first_order, state, _ = cpu.first_order_forward(*given, None, options, False)
    torch.testing.assert_close(first_order, o, rtol=0, atol=1e-6)
    torch.testing.assert_close(state, states[0], rtol=0, atol=1e-6)

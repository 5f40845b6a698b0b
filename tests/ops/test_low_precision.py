"""bfloat16 and float16 inputs, held to the error of an independent recurrence that rounds what a kernel must."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from momentum_cases import (
    Inputs,
    leaves,
    make_inputs,
    recurrence,
    relative_error,
    run_with_gradients,
    torch_chunk,
    unit,
)

SMALL_MULTIPLE = 2.0
LOW = [torch.bfloat16, torch.float16]


def rounding_recurrence(q, k, v, log_alpha, log_mu, beta, eta, initial_state, dtype: torch.dtype):
    """States in float32; the unit vectors, the errors and the output rounded to ``dtype`` once each, as a kernel with
    low-precision operands rounds them. Autograd rounds the gradients at the same places."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, k, v = rounded(unit(q.float())), rounded(unit(k.float())), v.float()
    S, M = initial_state
    outputs = []
    for t in range(q.shape[1]):
        alpha, mu = log_alpha[:, t].exp()[..., None, None], log_mu[:, t].exp()[..., None, None]
        probe = rounded(alpha[..., 0] * k[:, t])
        r = rounded(v[:, t] - torch.einsum("bhkv,bhk->bhv", S, probe))
        M = mu * M - eta[:, t, :, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, t], r)
        S = alpha * S - beta[:, t, :, None, None] * M
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(dtype), torch.stack([S, M])


def errors(function, inputs: Inputs, wanted) -> dict[str, float]:
    o, state, gradients = run_with_gradients(function, leaves(inputs))
    found = {"o": relative_error(o, wanted[0]), "final_state": relative_error(state, wanted[1])}
    return found | {name: relative_error(grad, wanted[2][name]) for name, grad in gradients.items()}


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("log_mu", [None, -0.1, -3.0, float("-inf")])
def test_low_precision_stays_within_the_budget_of_a_rounding_recurrence(
    dtype: torch.dtype, log_mu: float | None
) -> None:
    inputs = make_inputs(T=130, dtype=dtype)
    if log_mu is not None:
        inputs["log_mu"] = torch.full_like(inputs["log_mu"], log_mu)
    wanted = run_with_gradients(lambda x: recurrence(**x), leaves(inputs, torch.float64))
    budget = errors(lambda x: rounding_recurrence(**x, dtype=dtype), inputs, wanted)
    for name, error in errors(torch_chunk, inputs, wanted).items():
        assert error <= SMALL_MULTIPLE * budget[name], f"{name}: {error:.1e}, budget {budget[name]:.1e}"


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
def test_outputs_lose_only_their_own_rounding(dtype: torch.dtype) -> None:
    """Everything inside is float32: the output is the exact one rounded, the state as good as from float32 inputs."""
    inputs = make_inputs(T=200, dtype=dtype)
    o, state = torch_chunk(inputs)
    wanted_o, wanted_state = recurrence(**{name: x.double() for name, x in inputs.items()})
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    one_rounding = torch.finfo(dtype).eps / 2
    assert relative_error(o, wanted_o) <= 1.01 * one_rounding
    assert relative_error(state, wanted_state) <= 2e-6


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
def test_gates_may_have_the_low_precision_too(dtype: torch.dtype) -> None:
    inputs = make_inputs(T=65, dtype=dtype)
    for name in ("log_alpha", "log_mu", "beta", "eta"):
        inputs[name] = inputs[name].to(dtype)
    o, _ = torch_chunk(inputs)
    wanted, _ = recurrence(**{name: x.double() for name, x in inputs.items()})
    assert relative_error(o, wanted) <= 1.01 * torch.finfo(dtype).eps / 2


def test_float64_stays_float64() -> None:
    inputs = make_inputs(T=100, dtype=torch.float64)
    found = run_with_gradients(torch_chunk, leaves(inputs))
    wanted = run_with_gradients(lambda x: recurrence(**x), leaves(inputs))
    assert found[0].dtype == found[1].dtype == torch.float64
    assert relative_error(found[0], wanted[0]) <= 1e-14
    assert relative_error(found[1], wanted[1]) <= 1e-14
    for name, gradient in found[2].items():
        assert relative_error(gradient, wanted[2][name]) <= 1e-13, name

"""What the native kernel keeps of keys that come again, and what one damaged token may reach."""

from __future__ import annotations

import pytest
import torch

from cpu_cases import Inputs, definition, error, gradients, make_inputs, options_for
from mdn.ops import cpu

SEEDS = range(4)


def weakly_damped(noise: float, seed: int, T: int = 192) -> Inputs:
    """One key again and again, or nearly so, and gates under which a write goes on for a hundred tokens."""
    inputs = make_inputs(time=T, heads=1, key_dim=64, value_dim=16, with_state=False, seed=seed)
    ones = torch.ones(1, T, 1)
    inputs.log_alpha, inputs.log_mu, inputs.beta, inputs.eta = -0.01 * ones, -0.01 * ones, ones, 2 * ones
    inputs.k = inputs.k[:, :1] + noise * inputs.k
    return inputs


def errors(noise: float, seed: int, chunk_size: int) -> tuple[list[float], list[float]]:
    """Of the outputs and of every gradient: the kernel's, and those of the recurrence in float32."""
    inputs = weakly_damped(noise, seed)
    options = options_for(inputs, chunk_size=chunk_size)
    exact_inputs, single_inputs = inputs.leaves(), inputs.converted(torch.float32)
    for x in single_inputs.as_tuple():
        if x is not None:
            x.requires_grad_()
    exact, single = definition(exact_inputs, options), definition(single_inputs, options)
    grad_o, grad_state, expected = gradients(exact, exact_inputs)
    *_, of_single = gradients(single, single_inputs)
    with torch.no_grad():
        o, _, residual = cpu.forward(inputs.as_tuple(), None, options, True)
        found = cpu.backward(grad_o, grad_state, inputs.as_tuple(), residual, None, options)

    def compared(o: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]) -> list[float]:
        pairs = [(x, y) for x, y in zip(gradients, expected, strict=True) if x is not None]
        return [error(o, exact[0]), *(error(x, y) for x, y in pairs)]

    return compared(o, found), compared(single[0].detach(), of_single)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.3])
def test_with_small_chunks_keys_that_come_again_lose_little_more_than_in_the_recurrence(noise: float) -> None:
    """At most ten times as much, for outputs and each gradient, as a geometric mean over several inputs."""
    ratios = []
    for seed in SEEDS:
        kernel, recurrence = errors(noise, seed, chunk_size=16)
        ratios.append([x / max(y, 6e-7) for x, y in zip(kernel, recurrence, strict=True)])
    means = torch.tensor(ratios).log().mean(0).exp()
    assert means.max() <= 10, means


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [5, 37, 63])
def test_a_damaged_token_does_not_reach_earlier_ones(name: str, value: float, token: int) -> None:
    inputs = make_inputs(time=64, key_dim=128)
    options = options_for(inputs)
    clean = cpu.forward(inputs.as_tuple(), None, options, False).o
    getattr(inputs, name)[:, token] = value
    damaged = cpu.forward(inputs.as_tuple(), None, options, False).o
    assert torch.equal(damaged[:, :token], clean[:, :token])
    assert not damaged[:, token].isfinite().all()


def test_gates_and_states_may_be_float64() -> None:
    inputs = make_inputs(time=20)
    options = options_for(inputs)
    expected = cpu.forward(inputs.as_tuple(), None, options, True)
    names = ("log_alpha", "log_mu", "beta", "eta", "initial_state")
    wide = inputs.as_tuple()._replace(**{name: getattr(inputs, name).double() for name in names})
    actual = cpu.forward(wide, None, options, True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    gradients = cpu.backward(actual.o, actual.final_state, wide, actual.residual, None, options)
    assert gradients.beta.dtype == gradients.initial_state.dtype == torch.float64

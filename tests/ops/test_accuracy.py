"""float32 against a float64 recurrence: outputs and states to 2e-6, gradients to 1e-5, for every gate value."""

from __future__ import annotations

import pytest
import torch

from momentum_cases import (
    HARD_ZERO,
    OUTPUT_BAR,
    Inputs,
    assert_within_bars,
    converted,
    errors_against_recurrence,
    make_inputs,
    recurrence,
    torch_chunk,
)

LENGTHS = (1, 2, 63, 64, 65, 200)
CONSTANT_LOG_MU = (0.0, -0.1, -0.5, -1.0, -2.0, -3.0, -20.0, HARD_ZERO)


def constant(inputs: Inputs, **gates: float) -> Inputs:
    return inputs | {name: torch.full_like(inputs[name], value) for name, value in gates.items()}


def scattered(inputs: Inputs, name: str, value: float, share: float = 0.2, seed: int = 3) -> Inputs:
    """The gate set to a value at random tokens."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(inputs[name].shape, generator=generator) < share
    return inputs | {name: inputs[name].masked_fill(chosen, value)}


def wide(inputs: Inputs, name: str, smallest: float, seed: int = 5) -> Inputs:
    """A log gate uniform between ``smallest`` and 0, differing from token to token."""
    generator = torch.Generator().manual_seed(seed)
    return inputs | {name: smallest * torch.rand(inputs[name].shape, generator=generator)}


@pytest.mark.parametrize("log_mu", CONSTANT_LOG_MU)
@pytest.mark.parametrize("T", LENGTHS)
def test_constant_log_mu(T: int, log_mu: float) -> None:
    assert_within_bars(errors_against_recurrence(constant(make_inputs(T=T), log_mu=log_mu)))


@pytest.mark.parametrize("smallest", [-0.1, -2.0, -30.0, -200.0])
@pytest.mark.parametrize("T", LENGTHS)
def test_random_log_mu(T: int, smallest: float) -> None:
    assert_within_bars(errors_against_recurrence(wide(make_inputs(T=T), "log_mu", smallest)))


@pytest.mark.parametrize("log_alpha", [0.0, -1e-7, -1e-4, -5.0, -50.0, HARD_ZERO])
@pytest.mark.parametrize("T", LENGTHS)
def test_alpha_to_one_and_to_zero(T: int, log_alpha: float) -> None:
    """With alpha at 1 nothing forgets, so beta eta stays below 1 as a delta rule needs."""
    inputs = constant(make_inputs(T=T), log_alpha=log_alpha)
    assert_within_bars(errors_against_recurrence(inputs | {"beta": 0.5 * inputs["beta"]}))


@pytest.mark.parametrize("name", ["log_alpha", "log_mu"])
@pytest.mark.parametrize("value", [HARD_ZERO, -1000.0, -88.0, 0.0])
def test_gates_of_zero_and_one_among_ordinary_ones(name: str, value: float) -> None:
    assert_within_bars(errors_against_recurrence(scattered(make_inputs(T=200), name, value)))


@pytest.mark.parametrize("name", ["beta", "eta"])
@pytest.mark.parametrize("T", LENGTHS)
def test_no_write_and_no_step(T: int, name: str) -> None:
    """Nothing is written when eta is 0, so decays are slow here: some of the initial state must be left to compare."""
    inputs = make_inputs(T=T)
    slow = inputs | {"log_alpha": 0.02 * inputs["log_alpha"], "log_mu": 0.02 * inputs["log_mu"]}
    assert_within_bars(errors_against_recurrence(constant(slow, **{name: 0.0})))
    assert_within_bars(errors_against_recurrence(scattered(inputs, name, 0.0, share=0.5)))


@pytest.mark.parametrize("T", [64, 200])
def test_a_state_that_decays_to_nothing_is_exact_on_the_scale_where_it_began(T: int) -> None:
    """exp(-60) from float32 logs has a relative error of 60 roundings, and exp(-200) is not a float32 at all."""
    inputs = constant(make_inputs(T=T), eta=0.0)
    with torch.no_grad():
        _, found = torch_chunk(inputs)
        _, wanted = recurrence(**converted(inputs, torch.float64))
    assert wanted.abs().max() < 1e-20
    assert (found.double() - wanted).abs().max() <= OUTPUT_BAR * inputs["initial_state"].abs().max()


def test_both_decays_hard_zero_leave_only_the_last_write() -> None:
    inputs = constant(make_inputs(T=65), log_alpha=HARD_ZERO, log_mu=HARD_ZERO)
    assert_within_bars(errors_against_recurrence(inputs))


@pytest.mark.parametrize("log_mu", [-1.0, -3.0, -20.0])
def test_alpha_near_one_with_falling_mu(log_mu: float) -> None:
    """Where the paper's quotient of cumulative products loses all digits: log_mu far below log_alpha."""
    inputs = constant(make_inputs(T=256, K=64, V=64, B=1), log_mu=log_mu, log_alpha=-1e-3)
    assert_within_bars(errors_against_recurrence(inputs | {"beta": 0.5 * inputs["beta"]}))


@pytest.mark.parametrize("log_mu", [-0.1, -2.0])
def test_the_head_size_of_the_paper(log_mu: float) -> None:
    inputs = constant(make_inputs(B=1, T=200, H=1, K=128, V=256), log_mu=log_mu)
    assert_within_bars(errors_against_recurrence(inputs))


def test_gates_of_all_kinds_at_once() -> None:
    inputs = wide(make_inputs(T=200, with_p=True, H=2, HV=4), "log_mu", -30.0)
    extremes = [("log_alpha", HARD_ZERO), ("log_mu", HARD_ZERO), ("beta", 0.0), ("eta", 0.0), ("log_mu", 0.0)]
    for seed, (name, value) in enumerate(extremes):
        inputs = scattered(inputs, name, value, share=0.1, seed=seed)
    assert_within_bars(errors_against_recurrence(inputs))

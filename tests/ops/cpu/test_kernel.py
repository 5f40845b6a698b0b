"""What is particular to the native kernel: threads, rounding, repeated keys, and what it refuses before it runs.

That it computes the definition is in tests/ops/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from conformance import Case, answer, backend_form, error_by_head, inputs_of
from definition import Tensors, leaves, make_inputs, relative_error, run_with_gradients
from mdn.ops import SequenceBoundaries, chunk_momentum_delta_rule, cpu, explain_backend, momentum_delta_step
from mdn.ops.cpu import bindings
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState

pytestmark = pytest.mark.native


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bundle(inputs: Tensors) -> RuleTensors:
    return RuleTensors(**{"p": None} | inputs)


OPTIONS = RuleOptions(scale=0.25)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("HV", [1, 3])
def test_dividing_a_head_among_threads_changes_only_the_order_of_sums(count: int, HV: int) -> None:
    """Fewer heads than threads, or a number that does not divide evenly: the columns of V are divided."""
    case = Case(B=1, T=150, HV=HV, K=64, V=96, with_p=True, chunk_size=64)
    with threads(count):
        actual = run_with_gradients(backend_form(case, "cpu"), leaves(inputs_of(case)))
    with threads(1):
        expected = run_with_gradients(backend_form(case, "cpu"), leaves(inputs_of(case)))
    for name, x in actual.items():
        assert relative_error(x, expected[name]) <= 1e-5, name


def test_several_threads_give_the_same_step() -> None:
    inputs = make_inputs(B=4, T=1, H=4, K=64, V=64)
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    results = []
    for count in (1, 3):
        with threads(count):
            state = inputs["initial_state"].clone()
            results.append((momentum_delta_step(**token, p=None, state=state, backend="cpu"), state))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, float("nan"), 1e-30])
def test_bfloat16_is_rounded_as_torch_rounds(value: float) -> None:
    """Nothing decays and nothing is written: the output is the state, a float32."""
    one, gate = torch.ones(1, 1, 1, 1).bfloat16(), torch.zeros(1, 1, 1)
    state = torch.full((2, 1, 1, 1, 1), value)
    options = {"scale": 1.0, "use_qk_l2norm_in_kernel": False, "backend": "cpu"}
    o, _ = chunk_momentum_delta_rule(
        one, 0 * one, 0 * one, gate, gate, beta=gate, eta=gate, initial_state=state, **options
    )
    torch.testing.assert_close(o.flatten(), torch.tensor([value]).bfloat16(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.3])
def test_with_small_chunks_keys_that_come_again_lose_little_more_than_in_the_recurrence(noise: float) -> None:
    """At most ten times as much, for outputs and each gradient, as a geometric mean over several inputs."""
    ratios = []
    for seed in range(4):
        case = Case(B=1, T=192, HV=1, K=64, V=16, gates="weakly damped", with_state=False, seed=seed, key_noise=noise)
        actual = run_with_gradients(backend_form(case, "cpu"), leaves(inputs_of(case)))
        exact, single = answer(case).exact, answer(case).float32_errors
        errors = {name: error_by_head(case, name, x, exact[name]) for name, x in actual.items()}
        ratios.append([errors[name] / max(single[name], 6e-7) for name in errors])
    means = torch.tensor(ratios).log().mean(0).exp()
    assert means.max() <= 10, means


def test_gates_and_states_may_be_float64() -> None:
    inputs = make_inputs(T=20)
    expected = cpu.forward(bundle(inputs), None, OPTIONS, True)
    names = ("log_alpha", "log_mu", "beta", "eta", "initial_state")
    wide = bundle(inputs | {name: inputs[name].double() for name in names})
    actual = cpu.forward(wide, None, OPTIONS, True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    gradients = cpu.backward(actual.o, actual.final_state, wide, actual.residual, None, OPTIONS)
    assert gradients.beta.dtype == gradients.initial_state.dtype == torch.float64


def test_without_a_residual_the_output_is_the_same() -> None:
    inputs = bundle(make_inputs(T=100))
    saved, not_saved = (cpu.forward(inputs, None, OPTIONS, save) for save in (True, False))
    assert torch.equal(saved.o, not_saved.o)
    assert not_saved.residual.numel() == 0


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", lambda x: x[:, :-1]),
        ("v", lambda x: x[:, :-1]),
        ("beta", lambda x: x[..., :-1]),
        ("initial_state", lambda x: x[..., :-1]),
        ("q", lambda x: x.double()),
        ("v", lambda x: torch.cat([x, x[:, :, :1]], 2)),
    ],
)
def test_wrong_shapes_and_dtypes_are_named_before_the_kernel_runs(name: str, change) -> None:
    inputs = make_inputs(T=20)
    with pytest.raises(ValueError, match=f"^{name}"):
        cpu.forward(bundle(inputs | {name: change(inputs[name])}), None, OPTIONS, False)


def test_a_pack_that_does_not_cover_all_tokens_is_refused() -> None:
    inputs = bundle(make_inputs(B=1, T=20))
    with pytest.raises(ValueError, match="cu_seqlens"):
        cpu.forward(inputs, SequenceBoundaries.from_lengths([10, 9]), OPTIONS, False)


def token(inputs: Tensors) -> RuleTensors:
    return bundle({name: x[:, 0] for name, x in inputs.items() if name != "initial_state"} | {"initial_state": None})


@pytest.mark.parametrize("slot", [-1, 6, 1 << 40])
def test_a_slot_out_of_range_is_refused_and_nothing_changes(slot: int) -> None:
    inputs, pool = make_inputs(T=1), torch.ones(2, 6, 2, 16, 24)
    with pytest.raises(ValueError, match="state_indices"):
        cpu.step_(token(inputs), StepState(pool[0], pool[1], torch.tensor([0, slot])), OPTIONS)
    assert torch.equal(pool, torch.ones_like(pool))


@pytest.mark.parametrize("change", [lambda S: S.transpose(-1, -2), lambda S: S.double(), lambda S: S[:, :1]])
def test_states_that_cannot_be_updated_in_place_are_refused(change) -> None:
    inputs = make_inputs(T=1, K=24)
    S, M = inputs["initial_state"].clone()
    with pytest.raises(ValueError, match=r"^S must"):
        cpu.step_(token(inputs), StepState(change(S), M, None), OPTIONS)


def test_requested_where_it_was_not_built_it_raises_with_the_reason(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MDN_CPU_LIBRARY_DIR", str(tmp_path))
    bindings._find.cache_clear()
    try:
        assert cpu.why_unavailable() is not None
        with pytest.raises(ValueError, match="compiler"):
            chunk_momentum_delta_rule(**make_inputs(T=4), backend="cpu")
        assert "compiler" in explain_backend(torch.zeros(1))
        assert explain_backend(torch.zeros(1)).startswith("auto -> torch")
    finally:
        bindings._find.cache_clear()

"""The native CPU kernel computes what the token-by-token definition says: outputs, states and all nine gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpu_cases import (
    GRADIENT_ERROR,
    OUTPUT_ERROR,
    Inputs,
    definition,
    error,
    gradients,
    make_inputs,
    options_for,
    pack,
    with_hostile_gates,
)
from mdn.ops import cpu
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.cpu import bindings
from mdn.ops.momentum.interface import RuleOptions

NAMES = ("q", "k", "v", "p", "log_alpha", "log_mu", "beta", "eta", "initial_state")


@pytest.fixture(params=["best", "baseline"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Runs a test with the variant that was chosen for this processor, and with the one for any processor."""
    if request.param != "best":
        monkeypatch.setenv("MDN_CPU_ISA", request.param)
    bindings._find.cache_clear()
    yield cpu.instruction_set()
    bindings._find.cache_clear()


def check(inputs: Inputs, options: RuleOptions | None = None, boundaries: SequenceBoundaries | None = None) -> None:
    """Forward and backward against float64."""
    options = options or options_for(inputs)
    leaves = inputs.leaves()
    wanted = definition(leaves, options, None if boundaries is None else list(boundaries.offsets))
    o, final_state, residual = cpu.forward(inputs.as_tuple(), boundaries, options, True)
    assert error(o, wanted[0]) <= OUTPUT_ERROR
    assert error(final_state, wanted[1]) <= OUTPUT_ERROR
    grad_o, grad_state, expected = gradients(wanted, leaves)
    found = cpu.backward(grad_o, grad_state, inputs.as_tuple(), residual, boundaries, options)
    for name, gradient, want in zip(NAMES, found, expected, strict=True):
        assert (gradient is None) == (want is None), name
        if gradient is not None:
            assert error(gradient, want) <= GRADIENT_ERROR, name


@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 200])
def test_every_length_matches_the_definition(time: int, instruction_set: str) -> None:
    check(make_inputs(batch=2, time=time, key_dim=128 if time == 65 else 32))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (20, 24), (3, 1), (17, 130), (256, 16)])
def test_every_head_size_matches_the_definition(key_dim: int, value_dim: int, instruction_set: str) -> None:
    check(make_inputs(time=70, key_dim=key_dim, value_dim=value_dim))


def test_heads_of_one_number_match_the_definition() -> None:
    """Without the L2 norm: a normalised key of one number is its sign, and its gradient nearly nothing."""
    inputs = make_inputs(time=70, key_dim=1, value_dim=1)
    inputs = replace(inputs, q=inputs.q / 2, k=inputs.k / 2)
    check(inputs, options_for(inputs, l2norm=False))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hostile_gates_are_exact(seed: int, instruction_set: str) -> None:
    check(with_hostile_gates(make_inputs(time=140, key_dim=128, with_p=seed == 2, seed=seed), seed))


def test_a_first_token_that_forgets_everything_makes_the_initial_state_irrelevant() -> None:
    inputs = make_inputs(time=40)
    for gate in (inputs.log_alpha, inputs.log_mu):
        gate[:, 0] = float("-inf")
    other = replace(inputs, initial_state=torch.full_like(inputs.initial_state, 1e30))
    options = options_for(inputs)
    first, second = (cpu.forward(x.as_tuple(), None, options, True) for x in (inputs, other))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("lengths", [[0, 1, 70, 0, 1, 33, 0], [1] * 9, [0, 0], [128, 64]])
def test_packed_sequences_do_not_see_each_other(lengths: list[int], instruction_set: str) -> None:
    inputs = make_inputs(time=sum(lengths), sequences=len(lengths), key_dim=20, value_dim=24)
    check(inputs, boundaries=pack(lengths))
    check(replace(inputs, initial_state=None), boundaries=pack(lengths))


def test_an_empty_batch_of_tokens_passes_the_state_on() -> None:
    inputs = make_inputs(time=0)
    _, final_state, _ = cpu.forward(inputs.as_tuple(), None, options_for(inputs), True)
    assert torch.equal(final_state, inputs.initial_state)


@pytest.mark.parametrize("with_p", [False, True])
def test_value_heads_share_key_heads(with_p: bool, instruction_set: str) -> None:
    check(make_inputs(batch=2, time=50, heads=2, value_heads=6, with_p=with_p))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("p_times_alpha", [False, True])
@pytest.mark.parametrize("with_p", [False, True])
def test_every_way_to_read_p_matches_the_definition(l2norm: bool, p_times_alpha: bool, with_p: bool) -> None:
    inputs = make_inputs(time=50, with_p=with_p)
    if not l2norm:  # unnormalised keys of length 5 would make the states explode
        inputs = replace(inputs, q=inputs.q / 6, k=inputs.k / 6, p=None if inputs.p is None else inputs.p / 6)
    check(inputs, options_for(inputs, l2norm=l2norm, p_times_alpha=p_times_alpha))


@pytest.mark.parametrize("chunk_size", [1, 16, 17, 32, 48, 64, 128])
@pytest.mark.parametrize("key_dim", [32, 128])
def test_the_chunk_size_does_not_change_the_result(chunk_size: int, key_dim: int) -> None:
    inputs = make_inputs(time=130, heads=1, key_dim=key_dim)
    check(inputs, options_for(inputs, chunk_size=chunk_size))


def test_no_state_and_no_gradient_of_the_final_state_are_zeros() -> None:
    inputs = make_inputs(time=100, with_state=False)
    zeros = replace(inputs, initial_state=torch.zeros(2, 1, 2, 32, 48))
    options = options_for(inputs)
    grad_o = torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(3))
    o, state, residual = cpu.forward(inputs.as_tuple(), None, options, True)
    o_zeros, state_zeros, residual_zeros = cpu.forward(zeros.as_tuple(), None, options, True)
    torch.testing.assert_close(o, o_zeros)
    torch.testing.assert_close(state, state_zeros)
    found = cpu.backward(grad_o, None, inputs.as_tuple(), residual, None, options)
    wanted = cpu.backward(grad_o, torch.zeros_like(state), zeros.as_tuple(), residual_zeros, None, options)
    assert found[-1] is None
    for gradient, want in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(gradient, want)


def test_without_a_residual_the_output_is_the_same() -> None:
    inputs = make_inputs(time=100)
    with_residual, without = (cpu.forward(inputs.as_tuple(), None, options_for(inputs), save) for save in (True, False))
    assert torch.equal(with_residual[0], without[0])
    assert without[2].numel() == 0


@pytest.mark.parametrize("value_heads", [1, 2, 3])
def test_bfloat16_differs_from_the_definition_only_by_rounding(value_heads: int) -> None:
    inputs = make_inputs(time=90, heads=1, value_heads=value_heads, with_p=True, key_dim=20, value_dim=24)
    rounded = Inputs(*(x.bfloat16() if x.dim() == 4 else x for x in inputs.as_tuple()))
    leaves = rounded.leaves()
    options = options_for(inputs)
    wanted = definition(leaves, options)
    o, state, residual = cpu.forward(rounded.as_tuple(), None, options, True)
    assert o.dtype == torch.bfloat16
    assert state.dtype == residual.dtype == torch.float32
    half_a_step = 2.0**-8
    assert error(o, wanted[0]) <= half_a_step
    assert error(state, wanted[1]) <= OUTPUT_ERROR
    grad_o, grad_state, expected = gradients(wanted, leaves)
    found = cpu.backward(grad_o, grad_state, rounded.as_tuple(), residual, None, options)
    for name, gradient, want, given in zip(NAMES, found, expected, rounded.as_tuple(), strict=True):
        assert gradient.dtype == given.dtype, name
        assert error(gradient, want) <= 2 * half_a_step, name


@pytest.mark.parametrize("value", [0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, float("nan"), 1e-30])
def test_bfloat16_is_rounded_as_torch_rounds(value: float) -> None:
    inputs = make_inputs(time=1, heads=1, key_dim=1, value_dim=1, with_state=False)
    ones = replace(inputs, q=torch.ones_like(inputs.q), k=torch.ones_like(inputs.k), v=torch.ones_like(inputs.v))
    ones = replace(ones, log_alpha=inputs.log_alpha * 0, beta=inputs.beta * 0 + 1, eta=inputs.eta * 0 + 1)
    ones = Inputs(*(None if x is None else x.bfloat16() if x.dim() == 4 else x for x in ones.as_tuple()))
    o, _, _ = cpu.forward(ones.as_tuple(), None, options_for(inputs, scale=value, l2norm=False), False)
    torch.testing.assert_close(o.flatten(), torch.tensor([value]).bfloat16(), equal_nan=True, rtol=0, atol=0)


def everything(inputs: Inputs) -> list[torch.Tensor]:
    """Outputs and gradients in one list."""
    options = options_for(inputs)
    o, state, residual = cpu.forward(inputs.as_tuple(), None, options, True)
    found = cpu.backward(o, state, inputs.as_tuple(), residual, None, options)
    return [x for x in (o, state, *found) if x is not None]


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("value_heads", [1, 3])
def test_dividing_a_head_among_threads_does_not_change_the_result(threads: int, value_heads: int) -> None:
    """Fewer heads than threads, or a number that does not divide evenly: the columns of V are divided."""
    inputs = make_inputs(time=150, heads=1, value_heads=value_heads, key_dim=64, value_dim=96, with_p=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        check(inputs)
        wanted = everything(inputs)
        torch.set_num_threads(threads)
        found = everything(inputs)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other.double()) <= GRADIENT_ERROR


def test_tensors_need_not_be_contiguous() -> None:
    inputs = make_inputs(batch=2, time=40)
    options = options_for(inputs)
    strided = Inputs(
        *(None if x is None else x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs.as_tuple())
    )
    assert not strided.q.is_contiguous()
    for found, wanted in zip(*(cpu.forward(x.as_tuple(), None, options, True) for x in (strided, inputs)), strict=True):
        assert torch.equal(found, wanted)


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
    inputs = make_inputs(time=20)
    wrong = replace(inputs, **{name: change(getattr(inputs, name))})
    with pytest.raises(ValueError, match=f"^{name}"):
        cpu.forward(wrong.as_tuple(), None, options_for(inputs), False)


def test_a_pack_that_does_not_cover_all_tokens_is_refused() -> None:
    inputs = make_inputs(time=20)
    with pytest.raises(ValueError, match="cu_seqlens"):
        cpu.forward(inputs.as_tuple(), pack([10, 9]), options_for(inputs), False)

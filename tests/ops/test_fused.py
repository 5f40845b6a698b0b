"""Norms, SwiGLU, convolutions, gates, cross entropy, linear maps: the native kernels against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.layers import GatedRMSNorm, GateSettings, RMSNorm, ShortConvolution, StabilityGates, make_layout
from mdn.ops.cpu.linear import MOST_ROWS
from mdn.ops.fused import cross_entropy_sum, definitions_only, gated_rms_norm, is_native, linear, rms_norm, swiglu


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of all inputs, for one random gradient of the output."""
    inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in tensors]
    y = function(*inputs)
    y.backward(random(*y.shape, seed=99).to(dtype))
    return [y.detach(), *(x.grad for x in inputs)]


def check(function: Callable[..., Tensor], tensors: list[Tensor], tolerance: float = 2e-6) -> None:
    """Native float32 against the definition in float64, relative to the largest value of each tensor."""
    assert is_native(*tensors)
    native = gradients(function, tensors, torch.float32)
    exact = gradients(function, tensors, torch.float64)
    for found, expected in zip(native, exact):
        error = (found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        assert float(error) < tolerance
    with torch.no_grad():
        assert torch.equal(function(*tensors), native[0])


SHAPES = [(1, 3), (3, 5), (2, 16), (7, 33), (130, 64), (2, 3, 257)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_its_definition(shape: tuple[int, ...], every_instruction_set: None) -> None:
    check(lambda x, w: rms_norm(x, w, 1e-6), [random(*shape), random(shape[-1], seed=1)], 1e-5)


@pytest.mark.parametrize("activation", ["sigmoid", "swish"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_rms_norm_equals_its_definition(
    shape: tuple[int, ...], activation: str, every_instruction_set: None
) -> None:
    tensors = [random(*shape), random(*shape, seed=1, scale=5), random(shape[-1], seed=2)]
    check(lambda x, gate, w: gated_rms_norm(x, gate, w, 1e-5, activation), tensors, 1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (9001,), (0, 4)])
def test_swiglu_equals_its_definition(shape: tuple[int, ...], every_instruction_set: None) -> None:
    if 0 in shape:
        assert swiglu(random(*shape), random(*shape)).shape == shape
        return
    check(swiglu, [random(*shape, scale=4), random(*shape, seed=1)])


def test_large_and_small_arguments_of_the_activations_are_those_of_torch() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -87.5, -1e-30, 0.0, 1e-30, 87.5, 90.0, 200.0, 1e30, float("nan")])
    native = swiglu(gate, torch.ones(12))
    with definitions_only():
        expected = swiglu(gate, torch.ones(12))
    assert torch.allclose(native, expected, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lengths", [None, (1, 0, 70, 2, 3, 31)])
@pytest.mark.parametrize("has_state", [False, True])
def test_convolutions_equal_their_definition(
    width: int, bias: bool, lengths: tuple[int, ...] | None, has_state: bool, every_instruction_set: None
) -> None:
    torch.manual_seed(0)
    channels, activation = 35, width != 3
    convolution = ShortConvolution(channels, width, bias, activation)
    sequences = 3 if lengths is None else len(lengths)
    if lengths is None:
        layout, x = None, random(3, 45, channels)
    else:
        ends = [0, *itertools.accumulate(lengths)]
        layout, x = make_layout((1, ends[-1]), cu_seqlens=torch.tensor(ends)), random(1, ends[-1], channels)
    state = random(sequences, channels, width - 1, seed=2) if has_state else None
    names = [name for name, _ in convolution.named_parameters()]

    def convolve(x: Tensor, *parameters: Tensor) -> Tensor:
        for name, value in zip(names, parameters):
            delattr(convolution, name)
            setattr(convolution, name, value)
        return convolution(x, layout, None if state is None else state.to(x.dtype))[0]

    check(convolve, [x, *(p.detach() for p in convolution.parameters())])


@torch.no_grad()
@pytest.mark.parametrize("width", [2, 4, 6])
def test_the_convolution_step_continues_the_convolution(width: int, every_instruction_set: None) -> None:
    convolution = ShortConvolution(37, width, bias=True)
    x = random(2, 9, 37)
    expected, _ = convolution(x)
    _, state = convolution(x[:, :5], return_state=True)
    state = state.contiguous()
    for token in range(5, 9):
        assert torch.allclose(convolution.step(x[:, token], state), expected[:, token], atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("heads", [(4, 4), (2, 6)])
@pytest.mark.parametrize("fields", [{}, {"bound_alpha": False, "min_log_mu": None}, {"eta_activation": "sigmoid"},
                                    {"allow_neg_eigval": True, "bound_beta": False}])  # fmt: skip
def test_gates_equal_their_definition(heads: tuple[int, int], fields: dict, every_instruction_set: None) -> None:
    gates = StabilityGates(GateSettings(tau=3.0, **fields))
    H, HV = heads
    a, b, m, e = (random(15, HV, seed=seed, scale=8) for seed in range(4))
    per_head = [random(H, seed=4), random(HV, seed=5), random(H, seed=6), random(HV, seed=7), random(H, seed=8)]
    for given in ([a, b, m, e, *per_head], [a, b, None, e, *per_head[:2], None, None, None]):
        found = gates(*given)
        exact = gates(*(None if x is None else x.double() for x in given))
        for x, y in zip(found, exact):
            assert (x is None) == (y is None)
            if x is not None:
                assert torch.allclose(x.double(), y, rtol=3e-6, atol=2e-7)  # of eta, 1 + tanh near -1


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (70, 61), (3, 1000)])
def test_cross_entropy_equals_its_definition(shape: tuple[int, int], every_instruction_set: None) -> None:
    labels = torch.randint(0, shape[1], shape[:1], generator=torch.Generator().manual_seed(1))
    labels[1::3] = -100
    check(lambda logits: cross_entropy_sum(logits, labels), [random(*shape, scale=10)], 3e-6)


@pytest.mark.native
def test_labels_that_are_no_classes_are_refused() -> None:
    for wrong in (7, -1):
        with pytest.raises(ValueError, match="labels must be -100 or below the 7 classes"):
            cross_entropy_sum(random(2, 7), torch.tensor([0, wrong]))


@pytest.mark.native
def test_labels_that_were_overwritten_before_the_backward_pass_are_refused() -> None:
    labels = torch.tensor([1, 2, 3])
    loss = cross_entropy_sum(random(3, 7).requires_grad_(), labels)
    labels += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.native
def test_a_convolution_state_that_advanced_before_the_backward_pass_is_refused() -> None:
    convolution = ShortConvolution(5, 3)
    state = random(2, 5, 2)
    y, _ = convolution(random(2, 4, 5), state=state)
    with torch.no_grad():
        convolution.step(random(2, 5), state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_convolution_state_that_was_made_in_inference_mode_can_be_trained_on() -> None:
    convolution, x = ShortConvolution(5, 3), random(2, 4, 5)
    with torch.inference_mode():
        state = random(2, 5, 2, seed=1)
    assert state.is_inference()
    y, _ = convolution(x, state=state)
    y.sum().backward()
    found, convolution.weight.grad = convolution.weight.grad, None
    convolution(x, state=random(2, 5, 2, seed=1))[0].sum().backward()
    torch.testing.assert_close(found, convolution.weight.grad)


@pytest.mark.native
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17, MOST_ROWS])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 16), (17, 33), (35, 539), (70, 1100)])
def test_linear_maps_of_few_rows_equal_their_definition(
    rows: int, shape: tuple[int, int], every_instruction_set: None
) -> None:
    x, weight, bias = random(rows, shape[1]), random(*shape, seed=1), random(shape[0], seed=2)
    exact = F.linear(x.double(), weight.double(), bias.double())
    sizes = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    bound = (shape[1] + 8) * 2.0**-24 * sizes  # the rounding errors of a float32 sum of so many terms
    assert bool(((linear(x, weight, bias).double() - exact).abs() <= bound).all())
    without = linear(x, weight).double() - (exact - bias.double())
    assert bool((without.abs() <= bound).all())


@torch.no_grad()
def test_a_row_of_a_linear_map_depends_on_no_other_row(every_instruction_set: None) -> None:
    x, weight = random(16, 539), random(35, 539, seed=1)
    together = linear(x, weight)
    assert torch.equal(torch.cat([linear(row, weight) for row in x.split(1)]), together)
    x[3, 538] = float("nan")
    found = linear(x, weight)
    assert found[3].isnan().all()
    others = torch.arange(16) != 3
    assert torch.equal(found[others], together[others])


def test_linear_maps_with_gradients_many_rows_or_nothing_to_multiply_are_those_of_torch() -> None:
    x, weight, bias = random(2, 3, 20), random(7, 20, seed=1), random(7, seed=2)
    for tensors in itertools.product((x, x.transpose(0, 1)), (weight, weight.T.contiguous().T), (bias, None)):
        torch.testing.assert_close(linear(*tensors), F.linear(*tensors), rtol=1e-5, atol=1e-5)
    for chosen in (x, weight, bias):
        chosen.requires_grad_()
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        linear(x, weight, bias).sum().backward()
        assert chosen.grad is not None
        chosen.requires_grad_(False)
    assert linear(x[:0], weight).shape == (0, 3, 7)
    assert linear(x[0, 0], weight).shape == (7,)
    many = random(MOST_ROWS + 1, 20)
    assert torch.equal(linear(many, weight, bias), F.linear(many, weight, bias))
    assert linear(x.double(), weight.double()).dtype == torch.float64
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(random(2, 19), weight)


def swish_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return gated_rms_norm(x, gate, weight, 1e-6, "swish")


BROADCAST: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "a norm over two dimensions": (lambda x, w: rms_norm(x, w, 1e-6), [random(5, 3, 8), random(3, 8, seed=1)]),
    "one gate for all heads": (swish_norm, [random(2, 3, 4, 8), random(2, 3, 1, 8, seed=1), random(8, seed=2)]),
    "one gate for all rows": (swish_norm, [random(2, 3, 8), random(8, seed=1), random(8, seed=2)]),
    "one x for all gates": (swish_norm, [random(3, 8), random(2, 3, 8, seed=1), random(8, seed=2)]),
    "one up": (swiglu, [random(4, 8), random(1, 8, seed=1)]),
    "one gate": (swiglu, [random(8), random(4, 8, seed=1)]),
    "one number for all outputs": (linear, [random(2, 20), random(7, 20, seed=1), random(1, seed=2)]),
}


@pytest.mark.parametrize(("function", "tensors"), BROADCAST.values(), ids=BROADCAST.keys())
def test_shapes_that_torch_broadcasts_are_broadcast(function: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    found, exact = (gradients(function, tensors, dtype) for dtype in (torch.float32, torch.float64))
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(function(*tensors), found[0], rtol=1e-5, atol=1e-5)


UNFIT: dict[str, Callable[[], object]] = {
    "half a row": lambda: RMSNorm(32)(random(2, 64)),
    "part of a row": lambda: RMSNorm(48)(random(2, 64)),
    "more than a row": lambda: RMSNorm(128)(random(2, 64)),
    "a gate for other rows": lambda: GatedRMSNorm(8)(random(2, 3, 8), random(2, 2, 8)),
    "another width": lambda: swiglu(random(4, 8), random(4, 7)),
    "too few labels": lambda: cross_entropy_sum(random(5, 7), torch.zeros(4, dtype=torch.int64)),
    "labels of 4 bytes": lambda: cross_entropy_sum(random(5, 7), torch.zeros(5, dtype=torch.int32)),
    "a bias for other outputs": lambda: linear(random(2, 20), random(7, 20), random(6)),
}


@torch.no_grad()
@pytest.mark.parametrize("call", UNFIT.values(), ids=UNFIT.keys())
def test_shapes_that_torch_refuses_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        call()


@torch.no_grad()
def test_a_strided_bias_is_read_with_its_strides() -> None:
    x, weight, bias = random(2, 20), random(7, 20, seed=1), random(14, seed=2)[::2]
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_gates_of_shapes_that_the_kernel_does_not_know_are_those_of_torch() -> None:
    gates, projections = StabilityGates(GateSettings(tau=3.0)), [random(5, 6, seed=seed) for seed in range(4)]
    per_head = [random(2, seed=4), random(6, seed=5), random(2, seed=6), random(6, seed=7), random(2, seed=8)]
    for place, other in (
        (1, random(1, 6)),  # b of one row for all
        (3, random(5, 1)),
        (5, random(1)),
        (6, random(3)),  # Mu_log of more heads than A_log
        (6, None),  # no mu: it is 0
        (7, random(1)),
        (8, random(1)),
    ):
        given = [*projections, *per_head]
        given[place] = other
        exact = gates(*(None if x is None else x.double() for x in given))
        for x, y in zip(gates(*given), exact):
            if x is not None:
                torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="must match the size"):
        gates(projections[0], random(4, 6), *projections[2:], *per_head)


def test_inputs_that_are_not_contiguous_and_threads_change_nothing() -> None:
    x, gate, before = random(400, 200), random(400, 200, seed=1), torch.get_num_threads()
    weight = random(200, seed=2)
    try:
        torch.set_num_threads(1)
        expected = gradients(lambda x, g, w: gated_rms_norm(x, g, w, 1e-6, "swish"), [x, gate, weight], torch.float32)
        torch.set_num_threads(3)
        strided = [x.mT.contiguous().mT, torch.stack([gate, gate], -1)[..., 0], weight]
        found = gradients(lambda x, g, w: gated_rms_norm(x, g, w, 1e-6, "swish"), strided, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_second_derivatives_forward_mode_and_function_transforms_use_the_definition() -> None:
    x, weight = random(4, 20).requires_grad_(), random(20, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).square().sum(), x, create_graph=True)
    native = torch.autograd.grad(first.square().sum(), (x, weight))
    with definitions_only():
        (first,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).square().sum(), x, create_graph=True)
        expected = torch.autograd.grad(first.square().sum(), (x, weight))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(native, expected))
    by_row = torch.func.vmap(lambda row: rms_norm(row, weight, 1e-6))(x)
    assert torch.allclose(by_row, rms_norm(x, weight, 1e-6), atol=1e-6)
    _, tangent = torch.func.jvp(lambda x: swiglu(x, x), (x.detach(),), (torch.ones_like(x),))
    assert tangent.shape == x.shape


def test_other_dtypes_use_the_definition() -> None:
    norm, gated = RMSNorm(16), GatedRMSNorm(16)
    for dtype in (torch.bfloat16, torch.float64):
        x = random(3, 16).to(dtype)
        assert norm(x).dtype == gated(x, x).dtype == dtype
        assert not is_native(x)

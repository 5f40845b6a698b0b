"""Linear layers with packed weights: the product with the dequantised weights, and how far those are from the given."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from mdn.ops.cpu.linear import FORMATS, PackedWeight, linear, pack, unpack

pytestmark = pytest.mark.native

HALF_ULP = 2.0**-24
"""of float32"""
HALF_STEP = 1 / (2 * (127 << 16))
"""of the integers that stand for 32 neighbouring activations, where there is AVX-512 VNNI (csrc/digits.h)"""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_product(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> None:
    """Against float64, within the rounding errors of a float32 sum of so many terms."""
    weight, given = unpack(packed).double(), x.double()
    exact, sizes = given @ weight.T, given.abs() @ weight.T.abs()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    y = linear(x, packed, bias)
    assert y.shape == exact.shape
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= (packed.inputs + 8) * HALF_ULP * sizes).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7, 11, 12, 16, 17, 20, 49, 100])
def test_every_batch_is_the_product_with_the_dequantised_weights(
    format: str, batch: int, every_instruction_set: None
) -> None:
    check_product(random(batch, 96, seed=1), pack(random(80, 96), format), random(80, seed=2))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (15, 31), (16, 32), (17, 33), (35, 100), (300, 513)])
def test_odd_shapes_equal_the_product(format: str, shape: tuple[int, int], every_instruction_set: None) -> None:
    check_product(random(3, shape[1], seed=1), pack(random(*shape), format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("batch", [1, 16])
def test_large_activations_among_small_ones(format: str, batch: int, every_instruction_set: None) -> None:
    """A large one may cost its 31 neighbours what float32 rounds it by, and no one else anything."""
    packed, x = pack(random(48, 256), format), random(batch, 256, seed=1)
    x[:, 5::64] *= 1e4
    x[:, 200:] *= 1e-30
    weight, given = unpack(packed).double(), x.double()
    sizes = given.abs() @ weight.T.abs()
    largest = given.view(batch, -1, 32).abs().amax(2)
    beside = largest @ weight.abs().view(48, -1, 32).sum(2).T
    off = (linear(x, packed).double() - given @ weight.T).abs()
    assert bool((off <= (packed.inputs + 8) * HALF_ULP * sizes + HALF_STEP * beside).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(
    format: str, batch: int, value: float, every_instruction_set: None
) -> None:
    packed, x = pack(random(40, 96), format), random(batch, 96, seed=1)
    before = linear(x, packed)
    x[-1, 50] = value
    y = linear(x, packed)
    assert not y[-1].isfinite().any()
    assert torch.equal(y[:-1], before[:-1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e34])
def test_activations_of_any_size(format: str, size: float, every_instruction_set: None) -> None:
    """Also those that a scale cannot be divided by; what is below 1e-37 may become zero."""
    packed, x = pack(random(40, 64) * 1e-3, format), random(2, 64, seed=1).sign() * size
    exact = x.double() @ unpack(packed).double().T
    sizes = x.double().abs() @ unpack(packed).double().T.abs()
    assert bool(((linear(x, packed).double() - exact).abs() <= 72 * HALF_ULP * sizes + 1e-37).all())


@pytest.mark.parametrize("format", FORMATS)
def test_leading_dimensions_and_rows_that_are_not_contiguous(format: str) -> None:
    packed = pack(random(20, 40), format)
    x = random(2, 40, 3, seed=1).transpose(1, 2)
    assert torch.equal(linear(x, packed), linear(x.contiguous().view(6, 40), packed).view(2, 3, 20))
    assert linear(x[:0], packed).shape == (0, 3, 20)
    assert linear(x[0, 0], packed).shape == (20,)


def test_bf16_is_exact_for_a_bfloat16_checkpoint_and_half_a_unit_off_otherwise() -> None:
    weight = random(50, 70)
    assert torch.equal(unpack(pack(weight.bfloat16(), "bf16")), weight.bfloat16().float())
    assert bool(((unpack(pack(weight, "bf16")) - weight).abs() <= 2.0**-8 * weight.abs()).all())


def test_int8_is_half_a_step_of_its_row_off() -> None:
    weight = random(50, 70) * torch.logspace(-6, 3, 50)[:, None]
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((unpack(pack(weight, "int8")) - weight).abs() <= 0.5001 * step).all())


def test_int4_is_half_a_step_of_its_group_off_or_one_at_the_far_end() -> None:
    weight = (random(50, 96) * torch.logspace(-6, 3, 50)[:, None]).view(50, 3, 32)
    step = weight.abs().amax(2, keepdim=True) / 8 * (1 + 2.0**-8)
    off = (unpack(pack(weight.flatten(1), "int4")).view_as(weight) - weight).abs()
    inside = weight.abs() <= 7.4 * step
    assert bool((off <= step * (1 + 1e-3)).all())
    assert bool((off <= 0.5001 * step)[inside].all())


@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_groups_of_zeros_stay_zeros(format: str) -> None:
    weight = random(20, 64)
    weight[3], weight[5, :32] = 0, 0
    unpacked = unpack(pack(weight, format))
    assert not unpacked[3].any()
    assert not unpacked[5, :32].any()
    check_product(random(2, 64, seed=1), pack(weight, format))


def test_activations_of_16_bits_are_computed_in_float32() -> None:
    packed, x = pack(random(40, 64), "int8"), random(2, 64, seed=1).bfloat16()
    assert torch.equal(linear(x, packed), linear(x.float(), packed).bfloat16())


@pytest.mark.parametrize("format", FORMATS)
def test_threads_change_nothing(format: str) -> None:
    packed, x, before = pack(random(1000, 256), format), random(5, 256, seed=1), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x, packed)
        torch.set_num_threads(3)
        assert torch.equal(linear(x, packed), alone)
    finally:
        torch.set_num_threads(before)


def _child(connection, packed: PackedWeight, x: torch.Tensor) -> None:
    connection.send(linear(x, packed).flatten().tolist())


def test_a_forked_child_can_call_after_the_parent_did() -> None:
    packed, x, before = pack(random(1000, 256), "int8"), random(2, 256, seed=1), torch.get_num_threads()
    torch.set_num_threads(2)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    try:
        here = linear(x, packed).flatten().tolist()
        child = context.Process(target=_child, args=(sender, packed, x))
        child.start()
        answered = receiver.poll(60)
        if not answered:
            child.kill()
        assert answered, "the forked child hangs"
        assert receiver.recv() == here
        child.join(10)
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_packed_or_multiplied_is_refused_by_name() -> None:
    weight = random(16, 32)
    packed = pack(weight, "int8")
    with pytest.raises(ValueError, match="format must be one of bf16, int8, int4, got 'int3'"):
        pack(weight, "int3")
    with pytest.raises(ValueError, match="weight must be a floating-point CPU matrix"):
        pack(weight[0], "int8")
    with pytest.raises(ValueError, match="weight must be finite"):
        pack(weight / 0, "int4")
    with pytest.raises(ValueError, match=r"x must have 32 inputs in its last dimension, got shape \[2, 31\]"):
        linear(random(2, 31), packed)
    with pytest.raises(ValueError, match=r"bias must have shape \[16\], got \[15\]"):
        linear(random(2, 32), packed, random(15))
    with pytest.raises(NotImplementedError, match=r"products with packed weights .* cannot follow tensor subclasses"):
        linear(TwoTensor(random(2, 32), random(2, 32)), packed)
    with pytest.raises(ValueError, match="no backward pass"):
        linear(random(2, 32).requires_grad_(), packed)

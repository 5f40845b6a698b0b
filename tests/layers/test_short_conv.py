"""The short convolution: against torch's conv1d, in pieces, one token at a time, packed."""

import pytest
import torch
import torch.nn.functional as F

from mdn.layers import ShortConvolution, TokenLayout
from mdn.layers.rwkv7 import TokenShift
from mdn.ops.boundaries import SequenceBoundaries

CHANNELS, WIDTH = 6, 4


def make(bias: bool = False) -> ShortConvolution:
    torch.manual_seed(0)
    convolution = ShortConvolution(CHANNELS, WIDTH, bias=bias).double()
    if bias:
        torch.nn.init.normal_(convolution.bias)
    return convolution


def by_conv1d(convolution: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.mT, (WIDTH - 1, 0))
    return F.silu(F.conv1d(padded, convolution.weight, convolution.bias, groups=CHANNELS)).mT


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("time", [1, 2, 3, 4, 17])
def test_it_is_the_causal_depthwise_convolution_followed_by_silu(time, bias):
    convolution = make(bias)
    x = torch.randn(2, time, CHANNELS, dtype=torch.float64)
    torch.testing.assert_close(convolution(x)[0], by_conv1d(convolution, x))


@pytest.mark.parametrize("sizes", [[5, 6, 1, 1, 4], [1] * 17, [17], [2, 15]])
def test_pieces_with_a_state_passed_on_equal_the_whole_sequence(sizes):
    convolution = make(bias=True)
    x = torch.randn(2, 17, CHANNELS, dtype=torch.float64)
    state, outputs = None, []
    for piece in x.split(sizes, dim=1):
        y, state = convolution(piece, None, state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), by_conv1d(convolution, x))
    torch.testing.assert_close(state, x[:, -WIDTH + 1 :].mT)


def test_a_step_equals_a_piece_of_one_token_and_moves_the_state_in_place():
    convolution = make()
    x = torch.randn(3, 9, CHANNELS, dtype=torch.float64)
    _, state = convolution(x[:, :5], return_state=True)
    state = state.clone()
    place = state.data_ptr()
    found = torch.stack([convolution.step(x[:, t], state) for t in range(5, 9)], dim=1)
    torch.testing.assert_close(found, by_conv1d(convolution, x)[:, 5:])
    assert state.data_ptr() == place
    torch.testing.assert_close(state, x[:, -WIDTH + 1 :].mT)


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_equal_separate_ones_and_empty_ones_keep_their_state(with_state):
    convolution = make()
    lengths = (3, 0, 1, 7, 0, 2)
    layout = TokenLayout((1, sum(lengths)), SequenceBoundaries.from_lengths(lengths))
    x = torch.randn(1, sum(lengths), CHANNELS, dtype=torch.float64)
    before = torch.randn(len(lengths), CHANNELS, WIDTH - 1, dtype=torch.float64) if with_state else None
    y, after = convolution(x, layout, before, return_state=True)
    for n, piece in enumerate(x.split(lengths, dim=1)):
        own = None if before is None else before[n : n + 1]
        expected, state = convolution(piece, None, own, return_state=True)
        torch.testing.assert_close(y.split(lengths, dim=1)[n], expected)
        torch.testing.assert_close(after[n : n + 1], state)
        if lengths[n] == 0:
            torch.testing.assert_close(state[0], torch.zeros_like(state[0]) if before is None else before[n])


def test_gradients_of_a_pack_stay_inside_their_sequence():
    convolution = make()
    layout = TokenLayout((1, 8), SequenceBoundaries.from_lengths([5, 3]))
    x = torch.randn(1, 8, CHANNELS, dtype=torch.float64, requires_grad=True)
    convolution(x, layout)[0][:, 5:].sum().backward()
    assert x.grad[:, :5].abs().max() == 0
    assert x.grad[:, 5:].abs().min() > 0


def test_half_precision_inputs_are_summed_in_float32():
    torch.manual_seed(0)
    convolution = ShortConvolution(CHANNELS, WIDTH).bfloat16()
    x = torch.randn(1, 64, CHANNELS).bfloat16()
    exact = by_conv1d(convolution.double(), x.double())
    found = convolution.bfloat16()(x)[0]
    assert found.dtype == torch.bfloat16
    # only the final rounding to 8 bits remains
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("make_layer", [lambda: ShortConvolution(CHANNELS, WIDTH), lambda: TokenShift(CHANNELS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_of_another_shape_are_refused_by_name(make_layer, dtype):
    layer = make_layer().to(dtype)
    history = layer.width - 1
    for shape in ((2, 5, CHANNELS + 1), (2, 5, 1), (5, CHANNELS)):
        with pytest.raises(ValueError, match=rf"x must have shape \[B, T, 6\], got \[{shape[0]}, "):
            layer(torch.ones(shape, dtype=dtype))
    x = torch.ones(2, 5, CHANNELS, dtype=dtype)
    for wrong in ((1, CHANNELS, history), (2, CHANNELS, history + 1), (2, CHANNELS - 1, history)):
        state = torch.zeros(wrong, dtype=dtype)
        with pytest.raises(ValueError, match=rf"state must have shape \[2, 6, {history}\], got \[{wrong[0]}, "):
            layer(x, None, state)
    with pytest.raises(ValueError, match="state must be on the device of x, cpu, got meta"):
        layer(x, None, torch.zeros(2, CHANNELS, history, dtype=dtype, device="meta"))
    layout = TokenLayout((1, 8), SequenceBoundaries.from_lengths([5, 3]))
    with pytest.raises(ValueError, match=r"x must begin with \[1, 8\] as the pack of the layout does, got \[2, 4"):
        layer(torch.ones(2, 4, CHANNELS, dtype=dtype), layout)
    with pytest.raises(ValueError, match=r"x must begin with \[1, 8\] as the pack of the layout does, got \[1, 7"):
        layer(torch.ones(1, 7, CHANNELS, dtype=dtype), layout)
    with pytest.raises(ValueError, match=rf"state must have shape \[2, 6, {history}\], got \[1, "):
        layer(torch.ones(1, 8, CHANNELS, dtype=dtype), layout, torch.zeros(1, CHANNELS, history, dtype=dtype))


@torch.no_grad()
@pytest.mark.parametrize("make_layer", [lambda: ShortConvolution(CHANNELS, WIDTH), lambda: TokenShift(CHANNELS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_refuses_inputs_and_states_of_another_shape(make_layer, dtype):
    layer = make_layer().to(dtype)
    history = layer.width - 1
    good = torch.zeros(2, CHANNELS, history, dtype=dtype)
    for shape in ((2, CHANNELS + 1), (2, 1), (2, 1, CHANNELS)):
        with pytest.raises(ValueError, match=r"x must have shape \[B, 6\], got \[2, "):
            layer.step(torch.ones(shape, dtype=dtype), good)
    x = torch.ones(2, CHANNELS, dtype=dtype)
    for wrong in ((1, CHANNELS, history), (2, CHANNELS, history + 1), (2, CHANNELS - 1, history), (2, CHANNELS)):
        state = torch.zeros(wrong, dtype=dtype)
        with pytest.raises(ValueError, match=rf"state must have shape \[2, 6, {history}\], got \[{wrong[0]}, "):
            layer.step(x, state)
    with pytest.raises(ValueError, match=rf"state must have shape \[slots, 6, {history}\], got \[9, 5, "):
        layer.step(x, torch.zeros(9, CHANNELS - 1, history, dtype=dtype), torch.tensor([3, 8]))
    with pytest.raises(ValueError, match=r"slots must have shape \[2\], got \[3\]"):
        layer.step(x, torch.zeros(9, CHANNELS, history, dtype=dtype), torch.tensor([3, 8, 1]))
    assert not good.any()
    with pytest.raises(ValueError, match="needs the state that the token comes after"):
        layer(x, step=True)
    with pytest.raises(ValueError, match="slots are for one token"):
        layer(x[:, None], state=good, slots=torch.tensor([0, 1]))


def test_a_width_below_two_is_refused():
    with pytest.raises(ValueError, match="conv_size"):
        ShortConvolution(4, 1)

"""RWKV's streams and its norm, against what they are short for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mdn.layers.rwkv7 import HeadGroupNorm
from mdn.layers.token_mixing import mixed_streams


def inputs(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, shifted = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    mixes = [torch.randn(1, 1, shape[-1], dtype=dtype) for _ in range(count)]
    return [tensor.requires_grad_() for tensor in (x, shifted, *mixes)]


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 171, 8), (2, 256, 5)])
def test_streams_and_their_gradients(count: int, shape: tuple[int, ...]) -> None:
    given = inputs(count, shape, torch.float32)
    grads = [torch.randn(shape) for _ in range(count)]
    found = mixed_streams(*given)
    found_gradients = torch.autograd.grad(found, given, grads)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = [exact[0] + exact[1] * mix for mix in exact[2:]]
    expected_gradients = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for a, b in zip([*found, *found_gradients], [*expected, *expected_gradients]):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-6 * float(b.detach().abs().max()))


def test_second_derivatives_and_float64() -> None:
    """In float32 a second derivative must not come from gradients that were made in place."""
    x, shifted, mix = inputs(1, (2, 3, 4), torch.float32)
    (stream,) = mixed_streams(x, shifted, mix)
    (of_shifted,) = torch.autograd.grad(stream.square().sum() / 2, shifted, create_graph=True)
    (again,) = torch.autograd.grad(of_shifted.sum(), mix)
    expected = (x + 2 * shifted * mix).sum((0, 1), keepdim=True)
    torch.testing.assert_close(again, expected)
    given = inputs(3, (2, 3, 4), torch.float64)
    assert torch.autograd.gradcheck(lambda *tensors: mixed_streams(*tensors), given)


def test_the_norm_is_the_group_norm() -> None:
    torch.manual_seed(0)
    norm, same = HeadGroupNorm(4, 24, 1e-3, 0.5), nn.GroupNorm(4, 24, 1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    same.load_state_dict(norm.state_dict())
    x = torch.randn(3, 5, 24)
    torch.testing.assert_close(norm(x), same(x.view(15, 24)).view_as(x))

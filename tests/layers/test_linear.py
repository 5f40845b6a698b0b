"""Packed linear layers where native code cannot follow: the dequantised weights are used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from mdn.layers.linear import PackedLinear, SharedInput


class TwoProjections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = PackedLinear(20, 40, "int8", bias=True), PackedLinear(12, 40, "int4", bias=False)
        for layer in (self.wide, self.narrow):
            layer.fill(torch.randn(layer.outputs, layer.inputs))
            layer.requires_grad_(False)
        SharedInput([self.wide])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wide(x), self.narrow(x)], -1)


def exported(strict: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: torch.export.export(model, (torch.zeros_like(x),), strict=strict).module()(x)


FOLLOWED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a subclass": lambda model, x: model(TwoTensor(x, x.clone())).a,
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "make_fx": lambda model, x: make_fx(model)(torch.zeros_like(x))(x),
    "torch.export": exported(strict=False),
    "torch.export, strict": exported(strict=True),
}


@torch.no_grad()
@pytest.mark.parametrize("how", FOLLOWED)
def test_what_native_code_cannot_follow_gets_the_dequantised_weights(how: str) -> None:
    model, x = TwoProjections(), torch.randn(3, 40)
    torch.testing.assert_close(FOLLOWED[how](model, x), model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_fake_tensors_get_shapes() -> None:
    model = TwoProjections()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(torch.randn(3, 40))).shape == (3, 32)

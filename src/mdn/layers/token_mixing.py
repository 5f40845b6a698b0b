"""Streams of RWKV: a token mixed with the one before it, in another proportion for every stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdn.ops.fused import any_requires_gradient, is_native

ROWS = 256
"""tokens whose gradients are found together: few enough to stay in the cache"""


def mixed_streams(x: Tensor, shifted: Tensor, *mixes: Tensor) -> tuple[Tensor, ...]:
    """``x + shifted * mix`` for every mix; x and shifted ``[B, T, D]``, a mix has D elements."""
    if is_native(x, shifted, *mixes) and any_requires_gradient((x, shifted, *mixes)):
        apply: Any = _MixedStreams.apply
        streams: tuple[Tensor, ...] = apply(x, shifted, *mixes)
        return streams
    return tuple(torch.addcmul(x, shifted, mix) for mix in mixes)


class _MixedStreams(torch.autograd.Function):
    """The gradients of all streams in one pass over memory; autograd by itself makes more than twenty for six."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shifted: Tensor, *mixes: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(shifted, *mixes)
        return tuple(torch.addcmul(x, shifted, mix) for mix in mixes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        shifted, *mixes = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself is to be differentiated
            return _differentiable_gradients(grads, shifted, mixes)
        return _gradients(grads, shifted, mixes)


def _differentiable_gradients(grads: tuple[Tensor, ...], shifted: Tensor, mixes: list[Tensor]) -> tuple[Tensor, ...]:
    of_mixes = ((grad * shifted).sum_to_size(mix.shape) for grad, mix in zip(grads, mixes))
    of_shifted = torch.stack([grad * mix for grad, mix in zip(grads, mixes)]).sum(0)
    return torch.stack(grads).sum(0), of_shifted, *of_mixes


def _gradients(grads: tuple[Tensor, ...], shifted: Tensor, mixes: list[Tensor]) -> tuple[Tensor, ...]:
    width = shifted.shape[-1]
    of_x, of_shifted = torch.empty_like(shifted), torch.empty_like(shifted)
    of_mixes = [torch.zeros(width) for _ in mixes]
    flat = [tensor.reshape(-1, width).split(ROWS) for tensor in (of_x, of_shifted, shifted, *grads)]
    product = torch.empty(ROWS, width)
    for to_x, to_shifted, rows, *given in zip(*flat):
        for stream, (grad, mix) in enumerate(zip(given, mixes)):
            if stream == 0:
                to_x.copy_(grad)
                torch.mul(grad, mix.view(-1), out=to_shifted)
            else:
                to_x.add_(grad)
                to_shifted.addcmul_(grad, mix.view(-1))
            of_mixes[stream] += torch.mul(grad, rows, out=product[: len(rows)]).sum(0)
    return of_x, of_shifted, *(total.view_as(mix) for total, mix in zip(of_mixes, mixes))

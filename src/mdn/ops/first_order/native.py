"""The scalar-decay rules through the native CPU kernel, with its own backward pass. Arguments as in scalar_decay.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn.ops.momentum_delta_rule.options import RuleOptions

from .backend import native_kernel
from .inputs import Inputs


class _NativeScalarDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, p, log_decay, beta, initial_state, boundaries, options, erase) -> Any:
        tensors = q, k, v, p, log_decay, beta, initial_state
        save = any(ctx.needs_input_grad)
        o, final, residual = native_kernel().first_order_forward(*tensors, boundaries, options, save, erase=erase)
        if save:
            ctx.save_for_backward(*tensors, residual)
            ctx.rest = boundaries, options, erase
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_final: Tensor) -> Any:
        *tensors, residual = ctx.saved_tensors
        boundaries, options, erase = ctx.rest
        gradients = native_kernel().first_order_backward(
            grad_o, grad_final, *tensors, residual, boundaries, options, erase=erase
        )
        return *gradients, None, None, None


def native_scalar_decay(
    inputs: Inputs, p: Tensor | None, log_decay: Tensor, beta: Tensor, chunk_size: int, read_decayed: bool
) -> tuple[Tensor, Tensor]:
    """Outputs and final states; q is scaled and everything normalised already."""
    options = RuleOptions(scale=1.0, chunk_size=chunk_size, l2norm=False, p_times_alpha=read_decayed)
    own_p = None if p is inputs.k else p  # the kernel's default is k: no copy of it, no separate gradient
    tensors = inputs.q, inputs.k, inputs.v, own_p, log_decay, beta, inputs.initial_state
    return _NativeScalarDecay.apply(*tensors, inputs.boundaries, options, p is not None)

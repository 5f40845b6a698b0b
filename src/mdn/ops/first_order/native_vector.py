"""The native CPU kernel of the rules with a decay per key dimension: chunk by chunk with gradients, and one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.cpu import vector_decay
from mdn.ops.cpu.vector_decay import VectorTensors
from mdn.ops.first_order.first_derivative import first_derivative_only
from mdn.ops.first_order.inputs import PreparedTensors
from mdn.ops.shared_checks import without_autocast


def native_vector_decay(
    x: PreparedTensors, initial_state: Tensor, boundaries: SequenceBoundaries | None, outputs: bool = True
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, HV, V]`` (if needed) and final states ``[N, HV, K, V]``, float32."""
    with without_autocast(x.v):
        tensors = _kernel_tensors(x, initial_state.contiguous())
        kernel: Any = _NativeVectorDecay.apply
        o, final = kernel(boundaries, outputs, *tensors)
    return o, final


def native_vector_step_(x: PreparedTensors, state: Tensor, slots: Tensor | None) -> Tensor:
    """One token ``[B, HV, D]``; ``state`` changes in place. Returns o ``[B, HV, V]``."""
    return vector_decay.step_(_kernel_tensors(x, state), None if slots is None else slots.to(torch.int64).contiguous())


def _kernel_tensors(x: PreparedTensors, state: Tensor) -> VectorTensors:
    """The writing strength goes into k."""
    k = x.k if x.beta is None else x.beta.unsqueeze(-1) * x.k
    q, k, v, log_alpha = (y.contiguous() for y in (x.q, k, x.v, x.log_alpha))
    p, e = (None if y is None else y.contiguous() for y in (x.p, x.erase_key))
    return VectorTensors(q, k, v, p, e, log_alpha, state)


class _NativeVectorDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundaries: SequenceBoundaries | None, outputs: bool, *given: Tensor | None) -> Any:
        tensors, save = VectorTensors(*given), any(ctx.needs_input_grad)  # type: ignore[arg-type]
        output = vector_decay.forward(tensors, boundaries, save, outputs)
        if save:
            ctx.boundaries = boundaries
            ctx.save_for_backward(*tensors, output.solved)
        return output.o, output.final

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], grad_o: Tensor, grad_final: Tensor) -> Any:
        *given, solved = saved
        tensors = VectorTensors(*given)
        gradients = vector_decay.backward(grad_o.contiguous(), grad_final.contiguous(), tensors, solved, ctx.boundaries)
        return None, None, *gradients

"""Norms, SwiGLU, short convolutions, gates, cross entropy and linear maps of few rows: each a torch definition, and a
native kernel for CPUs.

Every function here computes its torch definition. For float32 CPU tensors the native kernel does so in one pass over
memory, forward and backward. The definition itself runs elsewhere, for subclasses of Tensor, under torch.compile and
tracers, for shapes that the kernel does not know (which torch broadcasts or refuses) and for derivatives that it does
not know (forward mode, torch.func, second derivatives). ``with definitions_only():`` switches the native code off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from mdn.ops.cpu import layers as native
from mdn.ops.cpu import why_unavailable
from mdn.ops.cpu.linear import MOST_ROWS, linear_of_rows
from mdn.ops.shared_checks import in_plain_memory

IGNORE_INDEX = -100
"""the label of a position that counts for nothing, as in torch's cross_entropy"""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "swish": F.silu, "silu": F.silu}

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])

_definitions_only = False


@contextmanager
def definitions_only() -> Iterator[None]:
    """Nothing here is native inside the ``with`` block, for tests and comparisons."""
    global _definitions_only
    before, _definitions_only = _definitions_only, True
    try:
        yield
    finally:
        _definitions_only = before


def is_native(*tensors: Tensor | None) -> bool:
    """Whether the native kernel computes for these tensors."""
    for x in tensors:
        if x is not None and (x.dtype is not torch.float32 or not x.is_cpu):
            return False
    if _definitions_only or torch.compiler.is_compiling() or why_unavailable() is not None:
        return False
    return in_plain_memory(tensors) and forward_ad._current_level < 0


def any_requires_gradient(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class Kernel(Generic[Result]):
    """A function of tensors (None where one is absent), and its hand-written gradient."""

    def fits(self, *tensors: Any) -> bool:
        """Whether the native form reads and writes no more than these shapes hold: it gets addresses only. Called for
        every call of the kernel, so by comparing shapes and nothing else."""
        raise NotImplementedError

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """What the backward pass reads beside the tensors; it must not change before."""
        return ()

    def definition(self, *tensors: Any) -> Result:
        raise NotImplementedError

    def forward(self, *tensors: Any) -> Result:
        """The same, natively; all tensors fit and are contiguous."""
        raise NotImplementedError

    def backward(self, grad: Result, *tensors: Any) -> tuple[Tensor | None, ...]:
        """One gradient per tensor."""
        raise NotImplementedError

    def __call__(self, *tensors: Tensor | None) -> Result:
        if not is_native(*tensors) or not self.fits(*tensors) or not in_plain_memory(self.constants):
            return self.definition(*tensors)
        contiguous = [None if x is None else x.contiguous() for x in tensors]
        if any_requires_gradient(tensors):
            if any(x.is_inference() for x in self.constants):  # which autograd refuses to save
                return self.definition(*tensors)
            apply: Any = _NativeFunction.apply
            y: Result = apply(self, *contiguous)
            return y
        return self.forward(*contiguous)


class _NativeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel[Any], *tensors: Tensor | None) -> Any:
        ctx.kernel, ctx.count = kernel, len(tensors)
        ctx.save_for_backward(*tensors, *kernel.constants)
        result = kernel.forward(*tensors)
        ctx.is_one_tensor = isinstance(result, Tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors[: ctx.count]  # raises if one of them or of the constants has changed
        if torch.is_grad_enabled():  # the gradient itself is to be differentiated
            return None, *_gradients_of_definition(ctx.kernel, grads, tensors)
        given = tuple(grad.contiguous() for grad in grads)
        return None, *ctx.kernel.backward(given[0] if ctx.is_one_tensor else given, *tensors)


def _gradients_of_definition(
    kernel: Kernel[Any], grads: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    result = kernel.definition(*tensors)
    results = (result,) if isinstance(result, Tensor) else result
    found = iter(torch.autograd.grad(results, leaves, grads, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in tensors]


# --------------------------------------------------------------------------------------------------------------- norms


@dataclass(frozen=True)
class _Norm(Kernel[Tensor]):
    eps: float
    activation: str | None

    def fits(self, x: Tensor, weight: Tensor, gate: Tensor | None) -> bool:
        return x.shape[-1:] == weight.shape and (gate is None or gate.shape == x.shape)

    def definition(self, x: Tensor, weight: Tensor, gate: Tensor | None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), self.eps).to(x.dtype)
        return normed if gate is None or self.activation is None else normed * ACTIVATIONS[self.activation](gate)

    def forward(self, x: Tensor, weight: Tensor, gate: Tensor | None) -> Tensor:
        return native.norm(x, weight, gate, self.eps, self.activation)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None) -> tuple[Tensor | None, ...]:
        return native.norm_backward(grad, x, weight, gate, self.eps, self.activation)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last of ``[..., width]``, computed in float32 at least."""
    return _Norm(eps, None)(x, weight, None)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """``rms_norm(x) * activation(gate)``; the activation is "sigmoid" or "swish"."""
    return _Norm(eps, activation)(x, weight, gate)


# -------------------------------------------------------------------------------------------------------------- SwiGLU


class _SwiGlu(Kernel[Tensor]):
    def fits(self, gate: Tensor, up: Tensor) -> bool:
        return gate.shape == up.shape

    def definition(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return native.swiglu(gate, up)

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor | None, ...]:
        return native.swiglu_backward(grad, gate, up)


_swiglu = _SwiGlu()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return _swiglu(gate, up)


# -------------------------------------------------------------------------------------------------------- convolutions


@dataclass(frozen=True)
class Convolution(Kernel[Tensor]):
    """``y_t = silu(bias + sum_j w_j x_{t - W + 1 + j})`` per channel: x ``[B, T, C]``, weight ``[C, 1, W]``, bias
    ``[C]`` or None. ``define`` is the same in torch (layers/conv.py)."""

    settings: native.ConvolutionSettings
    define: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return () if self.settings.state is None else (self.settings.state,)

    def fits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        offsets, state, _ = self.settings
        channels, _, width = weight.shape
        return (
            x.shape[-1] == channels
            and x.numel() == offsets[-1] * channels
            and (bias is None or bias.shape == (channels,))
            and (state is None or state.shape == (len(offsets) - 1, channels, width - 1))
        )

    def definition(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.define(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return native.convolution(x, weight, bias, self.settings)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        return native.convolution_backward(grad, x, weight, bias, self.settings)


# ------------------------------------------------------------------------------------------------------- cross entropy


class _CrossEntropy(Kernel[Tensor]):
    """The sum over all labelled rows."""

    def __init__(self, labels: Tensor):
        self.labels = labels
        self.log_sum: Tensor | None = None

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return (self.labels,)

    def fits(self, logits: Tensor) -> bool:
        labels = self.labels
        return logits.shape[:-1] == labels.shape and labels.dim() == 1 and labels.dtype == torch.int64 and labels.is_cpu

    def definition(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, self.labels, ignore_index=IGNORE_INDEX, reduction="sum")

    def forward(self, logits: Tensor) -> Tensor:
        losses = native.cross_entropy(logits, self.labels)
        self.log_sum = losses.log_sum
        return losses.loss.sum()

    def backward(self, grad: Tensor, logits: Tensor) -> tuple[Tensor | None, ...]:
        assert self.log_sum is not None
        return (native.cross_entropy_backward(float(grad), logits, self.labels, self.log_sum),)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of logits ``[rows, classes]`` against int64 labels ``[rows]``, summed over the labelled rows
    (those whose label is not -100)."""
    kernel = _CrossEntropy(labels.contiguous())
    if is_native(logits) and kernel.fits(logits):
        wrong = (labels >= logits.shape[1]) | ((labels < 0) & (labels != IGNORE_INDEX))
        if bool(wrong.any()):
            raise ValueError(f"labels must be {IGNORE_INDEX} or below the {logits.shape[1]} classes")
    return kernel(logits)


# --------------------------------------------------------------------------------------------------------- linear maps


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x ``[..., inputs]``, weight ``[outputs, inputs]``, bias ``[outputs]``.

    Native for a few rows without gradients, a step of decoding: torch's product of one row uses one thread, which
    gets half of the memory bandwidth. The result for a row does not depend on the number of rows.
    """
    few = x.shape[-1] == weight.shape[-1] and 0 < x.numel() <= MOST_ROWS * weight.shape[-1]
    fits = weight.dim() == 2 and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    if not (few and fits) or not is_native(x, weight, bias) or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if any_requires_gradient((x, weight, bias)):
        return F.linear(x, weight, bias)
    y = linear_of_rows(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias)
    return y.view(*x.shape[:-1], len(weight))

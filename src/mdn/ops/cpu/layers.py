"""Calls of csrc/layers.h: what surrounds the rule in a model, forward and backward. Float32 CPU tensors, contiguous.

``mdn.ops.fused`` decides when they run and holds the definitions of what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.cpu.bindings import (
    Convolution,
    ConvolutionStep,
    CrossEntropy,
    GateMap,
    Norm,
    SwiGlu,
    call,
    point,
    point_at_offsets,
)

SMALL = 1 << 15
"""elements below which one thread is fastest"""
ACTIVATIONS = {None: 0, "sigmoid": 1, "swish": 2, "silu": 2}
"""MDN_NO_GATE, MDN_SIGMOID, MDN_SILU"""
ROWS_PER_UNIT, TOKENS_PER_UNIT = 64, 32
"""rows that one thread takes at a time; the gradients of parameters are summed separately for each such block"""


def threads_for(elements: int) -> int:
    return 1 if elements < SMALL else torch.get_num_threads()


def units_of(rows: int, per_unit: int) -> int:
    return -(-rows // per_unit)


# --------------------------------------------------------------------------------------------------------------- norms


def norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str | None) -> Tensor:
    """x and gate ``[..., width]``."""
    struct, y = _norm(x, weight, gate, eps, activation), torch.empty_like(x)
    struct.y = y.data_ptr()
    call("mdn_norm", struct)
    return y


class NormGradients(NamedTuple):
    x: Tensor
    weight: Tensor
    gate: Tensor | None


def norm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str | None
) -> NormGradients:
    struct = _norm(x, weight, gate, eps, activation)
    grad_x, grad_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
    partial = x.new_empty(units_of(struct.rows, ROWS_PER_UNIT), struct.width)
    point(struct, grad_y=grad_y, grad_x=grad_x, grad_gate=grad_gate, grad_weight=partial)
    call("mdn_norm_backward", struct)
    return NormGradients(grad_x, partial.sum(0), grad_gate)


def _norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str | None) -> Norm:
    width, elements = weight.shape[0], x.numel()
    return Norm(
        rows=elements // width,
        width=width,
        rows_per_unit=ROWS_PER_UNIT,
        activation=ACTIVATIONS[activation],
        threads=threads_for(elements),
        eps=eps,
        x=x.data_ptr(),
        gate=None if gate is None else gate.data_ptr(),
        weight=weight.data_ptr(),
    )


# -------------------------------------------------------------------------------------------------------------- SwiGLU


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    struct = SwiGlu(gate.numel(), threads_for(gate.numel()), gate.data_ptr(), up.data_ptr(), y.data_ptr())
    call("mdn_swiglu", struct)
    return y


def swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    struct = SwiGlu(gate.numel(), threads_for(gate.numel()))
    point(struct, gate=gate, up=up, grad_y=grad_y, grad_gate=grad_gate, grad_up=grad_up)
    call("mdn_swiglu_backward", struct)
    return grad_gate, grad_up


# -------------------------------------------------------------------------------------------------------- convolutions


MOST_TAPS = 4
"""the kernel convolves over 2, 3 or 4 tokens"""


class ConvolutionSettings(NamedTuple):
    offsets: Sequence[int]
    """where the sequences begin in all tokens together, and where the last one ends"""
    state: Tensor | None
    """[N, C, W - 1], the inputs before the first tokens; None: zeros"""
    silu: bool


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings) -> Tensor:
    """x ``[..., C]``, weight ``[C, 1, W]``, bias ``[C]``."""
    struct, y = _convolution(x, weight, bias, settings), torch.empty_like(x)
    point(struct, y=y)
    call("mdn_convolution", struct)
    return y


class ConvolutionGradients(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def convolution_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings
) -> ConvolutionGradients:
    struct = _convolution(x, weight, bias, settings)
    channels, width = weight.shape[0], weight.shape[2]
    units = units_of(settings.offsets[-1], TOKENS_PER_UNIT)
    grad_x, grad_taps = torch.empty_like(x), x.new_empty(units, width, channels)
    grad_bias = None if bias is None else x.new_empty(units, channels)
    point(struct, grad_y=grad_y, grad_x=grad_x, grad_weight=grad_taps, grad_bias=grad_bias)
    call("mdn_convolution_backward", struct)
    grad_weight = grad_taps.sum(0).mT.unsqueeze(1).contiguous()
    return ConvolutionGradients(grad_x, grad_weight, None if grad_bias is None else grad_bias.sum(0))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings) -> Convolution:
    struct = Convolution(
        sequences=len(settings.offsets) - 1,
        channels=weight.shape[0],
        width=weight.shape[2],
        tokens_per_unit=TOKENS_PER_UNIT,
        silu=settings.silu,
        threads=threads_for(x.numel()),
    )
    point_at_offsets(struct, settings.offsets)
    point(struct, x=x, weight=weight, bias=bias, state=settings.state)
    return struct


def convolution_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool) -> Tensor:
    """One token ``[B, C]``; ``state`` ``[B, C, W - 1]`` advances in place."""
    y = torch.empty_like(x)
    struct = ConvolutionStep(len(x), x.shape[1], weight.shape[2], silu)
    point(struct, x=x, weight=weight, bias=bias, state=state, y=y)
    call("mdn_convolution_step", struct, changed=(state,))
    return y


# --------------------------------------------------------------------------------------------------------------- gates


class GateTensors(NamedTuple):
    """Projections ``[..., HV]`` and parameters ``[H]`` or ``[HV]`` (layers/momentum_deltanet.py)."""

    a: Tensor
    b: Tensor
    m: Tensor | None
    e: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    Mu_log: Tensor | None
    mu_bias: Tensor | None
    log_factor: Tensor | None


def gates_fit(given: GateTensors) -> bool:
    """Whether the kernel knows them: e is there, m comes with its parameters, and nothing is to be broadcast."""
    a, b, m, e, A_log, dt_bias, Mu_log, mu_bias, log_factor = given
    if e is None or not (a.shape == b.shape == e.shape and dt_bias.shape == a.shape[-1:]):
        return False
    if m is not None and (m.shape != a.shape or Mu_log is None or mu_bias is None):
        return False
    heads = A_log.shape
    return (
        len(heads) == 1
        and a.shape[-1] % heads[0] == 0
        and (Mu_log is None or Mu_log.shape == heads)
        and (mu_bias is None or mu_bias.shape == dt_bias.shape)
        and (log_factor is None or log_factor.shape == heads)
    )


def momentum_gates(given: GateTensors, settings: dict[str, float]) -> Tensor:
    """``[4, ..., HV]``: log_alpha, log_mu, beta, eta, of tensors that fit; ``settings``: the switches and numbers of
    ``MdnGates``."""
    given = GateTensors(*(None if x is None else x.contiguous() for x in given))  # type: ignore[arg-type]
    gates = given.a.new_empty(4, *given.a.shape)
    heads = given.a.shape[-1]
    struct = GateMap(rows=given.a.numel() // heads, key_heads=len(given.A_log), value_heads=heads, **settings)
    point(struct, **given._asdict())
    size, first = given.a.numel() * 4, gates.data_ptr()
    struct.log_alpha, struct.log_mu, struct.beta, struct.eta = (first + i * size for i in range(4))
    call("mdn_gates", struct)
    return gates


# ------------------------------------------------------------------------------------------------------- cross entropy


class RowLosses(NamedTuple):
    """``[rows]`` each."""

    loss: Tensor
    log_sum: Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> RowLosses:
    """logits ``[rows, classes]``, labels int64 ``[rows]``; a negative label counts for nothing."""
    losses = RowLosses(logits.new_empty(len(logits)), logits.new_empty(len(logits)))
    struct = _cross_entropy(logits, labels)
    point(struct, loss=losses.loss, log_sum=losses.log_sum)
    call("mdn_cross_entropy", struct)
    return losses


def cross_entropy_backward(grad_loss: float, logits: Tensor, labels: Tensor, log_sum: Tensor) -> Tensor:
    """``grad_loss``: the gradient of every row's loss."""
    grad_logits = torch.empty_like(logits)
    struct = _cross_entropy(logits, labels)
    struct.grad_loss = grad_loss
    point(struct, log_sum=log_sum, grad_logits=grad_logits)
    call("mdn_cross_entropy_backward", struct)
    return grad_logits


def _cross_entropy(logits: Tensor, labels: Tensor) -> CrossEntropy:
    rows, classes = logits.shape
    rows_per_unit = max(1, min(ROWS_PER_UNIT, SMALL // max(classes, 1)))
    struct = CrossEntropy(rows, classes, rows_per_unit, threads_for(logits.numel()))
    point(struct, logits=logits, labels=labels)
    return struct

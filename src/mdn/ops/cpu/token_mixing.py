"""Calls of csrc/token_mixing.h: what surrounds RWKV-7's rule, forward and backward. Float32 CPU tensors, contiguous.

``mdn.layers.token_mixing`` decides when they run and holds the definitions of what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.cpu.bindings import MixedOutput, RuleInputs, Streams, call, point
from mdn.ops.cpu.layers import ROWS_PER_UNIT, threads_for, units_of

# ------------------------------------------------------------------------------------------------------------- streams


def streams(x: Tensor, shifted: Tensor, mixes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x and shifted ``[..., width]``; a mix has ``width`` elements."""
    struct = _streams(x, shifted, mixes)
    mixed = tuple(torch.empty_like(x) for _ in mixes)
    struct.y[: len(mixed)] = [y.data_ptr() for y in mixed]
    call("mdn_streams", struct)
    return mixed


def streams_backward(
    grads: Sequence[Tensor], x: Tensor, shifted: Tensor, mixes: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of x, of shifted and of every mix."""
    struct = _streams(x, shifted, mixes)
    struct.grad_y[: len(grads)] = [grad.data_ptr() for grad in grads]
    of_x, of_shifted = torch.empty_like(x), torch.empty_like(x)
    of_mixes = x.new_empty(units_of(struct.rows, ROWS_PER_UNIT), len(mixes), struct.width)
    point(struct, grad_x=of_x, grad_shifted=of_shifted, grad_mix=of_mixes)
    call("mdn_streams_backward", struct)
    return of_x, of_shifted, *(total.view_as(mix) for total, mix in zip(of_mixes.sum(0), mixes))


def _streams(x: Tensor, shifted: Tensor, mixes: Sequence[Tensor]) -> Streams:
    struct = Streams(
        rows=x.numel() // max(x.shape[-1], 1),
        width=x.shape[-1],
        rows_per_unit=ROWS_PER_UNIT,
        count=len(mixes),
        threads=threads_for(x.numel() * len(mixes)),
    )
    point(struct, x=x, shifted=shifted)
    struct.mix[: len(mixes)] = [mix.data_ptr() for mix in mixes]
    return struct


# ----------------------------------------------------------------------------------------------- arguments of the rule


class KeyTensors(NamedTuple):
    """``[..., H * D]``; the last two are parameters ``[H * D]``."""

    k: Tensor
    decay: Tensor
    rate: Tensor
    k_k: Tensor
    k_a: Tensor


class RuleArguments(NamedTuple):
    """``[..., H, D]``."""

    w: Tensor
    key: Tensor
    a: Tensor
    b: Tensor


def rule_inputs(given: KeyTensors, heads: int, slowest: float) -> RuleArguments:
    struct = _rule_inputs(given, heads, slowest)
    shape = (*given.k.shape[:-1], heads, struct.head_dim)
    found = RuleArguments(*(given.k.new_empty(shape) for _ in RuleArguments._fields))
    point(struct, **found._asdict())
    call("mdn_rule_inputs", struct)
    return found


def rule_inputs_backward(grads: RuleArguments, given: KeyTensors, heads: int, slowest: float) -> KeyTensors:
    struct = _rule_inputs(given, heads, slowest)
    partial = given.k.new_empty(2, units_of(struct.rows, ROWS_PER_UNIT), given.k.shape[-1])
    of_tokens = [torch.empty_like(given.k) for _ in range(3)]
    found = KeyTensors(*of_tokens, *partial)
    point(struct, **{f"grad_{name}": x for name, x in (grads._asdict() | found._asdict()).items()})
    call("mdn_rule_inputs_backward", struct)
    return KeyTensors(*of_tokens, *partial.sum(1))


def _rule_inputs(given: KeyTensors, heads: int, slowest: float) -> RuleInputs:
    width = given.k.shape[-1]
    struct = RuleInputs(
        rows=given.k.numel() // width,
        heads=heads,
        head_dim=width // heads,
        rows_per_unit=ROWS_PER_UNIT,
        threads=threads_for(given.k.numel()),
        slowest=slowest,
    )
    point(struct, **given._asdict())
    return struct


# -------------------------------------------------------------------------------------------------------------- output


class OutputTensors(NamedTuple):
    """``[..., H, D]``, the gate ``[..., H * D]``; the last three are parameters ``[H, D]`` or ``[H * D]``."""

    o: Tensor
    r: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    r_k: Tensor
    weight: Tensor
    bias: Tensor


def mixed_output(given: OutputTensors, eps: float) -> Tensor:
    """``[..., H * D]``."""
    struct, y = _mixed_output(given, eps), torch.empty_like(given.gate)
    struct.y = y.data_ptr()
    call("mdn_mixed_output", struct)
    return y


def mixed_output_backward(grad_y: Tensor, given: OutputTensors, eps: float) -> OutputTensors:
    struct = _mixed_output(given, eps)
    partial = grad_y.new_empty(3, units_of(struct.rows, ROWS_PER_UNIT), grad_y.shape[-1])
    of_tokens = [torch.empty_like(x) for x in given[:5]]
    found = OutputTensors(*of_tokens, *partial)
    point(struct, grad_y=grad_y, **{f"grad_{name}": x for name, x in found._asdict().items()})
    call("mdn_mixed_output_backward", struct)
    of_parameters = (total.view_as(x) for total, x in zip(partial.sum(1), given[5:]))
    return OutputTensors(*of_tokens, *of_parameters)


def _mixed_output(given: OutputTensors, eps: float) -> MixedOutput:
    heads, head_dim = given.o.shape[-2:]
    struct = MixedOutput(
        rows=given.o.numel() // (heads * head_dim),
        heads=heads,
        head_dim=head_dim,
        rows_per_unit=ROWS_PER_UNIT,
        threads=threads_for(given.o.numel()),
        eps=eps,
    )
    point(struct, **given._asdict())
    return struct

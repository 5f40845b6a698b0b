"""The only sequential part of every chunkwise form: carry the state from chunk to chunk.

For each chunk, with the state S ``[K, V]`` before it:

    R  = values - probes S                       the residual of this chunk
    S' = decay * S + writes^T R + added          decay is one number or one per key row

``values`` ``[chunks, H, C, V]``, ``probes`` and ``writes`` ``[chunks, H, C, K]`` come together or not at all, and
``added`` ``[chunks, H, K, V]`` may be absent too. ``rounds`` holds the chunks (first, end) of each step, as
``chunking`` cuts them. The backward pass is the same scan, backwards; it keeps the states and R and nothing else:

    grad_values = grad_R + writes grad_S'                                    also the gradient of R itself
    grad_S      = decay * grad_S' + grad_starts - probes^T grad_values
    grad_probes = -grad_values S^T,   grad_writes = R grad_S'^T,   grad_added = grad_S',   grad_decay = grad_S' * S
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdn.ops.chunking import Rounds
from mdn.ops.first_order.first_derivative import first_derivative_only


class ScannedStates(NamedTuple):
    starts: Tensor
    """[chunks, H, K, V]: the state before each chunk"""
    residual: Any
    """[chunks, H, C, V], or None without ``values``"""
    final: Tensor
    """[N, H, K, V]"""


def state_scan(
    decay: Tensor,
    initial: Tensor,
    rounds: Rounds,
    values: Tensor | None = None,
    probes: Tensor | None = None,
    writes: Tensor | None = None,
    added: Tensor | None = None,
) -> ScannedStates:
    """decay ``[chunks, H, 1 or K, 1]``, initial ``[N, H, K, V]``."""
    scan: Any = _StateScan.apply
    return ScannedStates(*scan(values, probes, writes, added, decay, initial, rounds))


class _StateScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Any, probes: Any, writes: Any, added: Any, decay: Tensor, initial: Tensor, rounds: Rounds
    ) -> Any:
        state = initial
        starts = state.new_empty(decay.shape[0], *state.shape[1:])
        R = None if values is None else torch.empty_like(values)
        finished = []
        for first, end in rounds:
            now, active = slice(first, end), end - first
            finished.append(state[active:])
            state = state[:active]
            starts[now] = state
            following = decay[now] * state
            if added is not None:
                following += added[now]
            if R is not None:
                residual = values[now] - probes[now] @ state
                R[now] = residual
                following += writes[now].transpose(-1, -2) @ residual
            state = following
        finished.append(state)
        final = torch.cat(finished[::-1])
        ctx.save_for_backward(probes, writes, R, decay, starts)
        ctx.rounds, ctx.has_added = rounds, added is not None
        return starts, R, final

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], grad_starts: Tensor, grad_R: Any, grad_final: Tensor) -> Any:
        probes, writes, R, decay, starts = saved
        grad_after = torch.empty_like(starts)  # of the state after each chunk
        grad_values = None if R is None else torch.empty_like(R)
        grad_state = grad_final[:0]
        for first, end in reversed(ctx.rounds):
            now, active = slice(first, end), end - first
            grad_state = torch.cat([grad_state, grad_final[grad_state.shape[0] : active]])
            grad_after[now] = grad_state
            grad_before = decay[now] * grad_state + grad_starts[now]
            if grad_values is not None:
                grad_values[now] = grad_R[now] + writes[now] @ grad_state
                grad_before -= probes[now].transpose(-1, -2) @ grad_values[now]
            grad_state = grad_before
        grad_initial = torch.cat([grad_state, grad_final[grad_state.shape[0] :]])
        grad_decay = (grad_after * starts).sum_to_size(decay.shape)
        grad_probes = grad_writes = None
        if grad_values is not None:
            grad_probes = -(grad_values @ starts.transpose(-1, -2))
            grad_writes = R @ grad_after.transpose(-1, -2)
        grad_added = grad_after if ctx.has_added else None
        return grad_values, grad_probes, grad_writes, grad_added, grad_decay, grad_initial, None

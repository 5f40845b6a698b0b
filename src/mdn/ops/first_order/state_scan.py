"""The only sequential part of every chunkwise form: carry the state from chunk to chunk.

For each chunk, with `C` rows and the state `S` `[K, V]` before it:

    R  = U - W S                         the errors of this chunk
    S' = decay * S + X^T R + E           decay is one number or one per key row

`U` `[chunks, H, C, V]`, `W` and `X` `[chunks, H, C, K]` come together or not at all, and `E` `[chunks, H, K, V]` may be
absent too. Returns the state before each chunk, `R`, and the final states. The backward pass is the same scan,
backwards; it keeps the states and `R` and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Steps = list[tuple[int, int]]


class _StateScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, U: Any, W: Any, X: Any, E: Any, decay: Tensor, initial: Tensor, steps: Steps) -> Any:
        state = initial
        starts = state.new_empty(decay.shape[0], *state.shape[1:])
        R = None if U is None else torch.empty_like(U)
        finished = []
        for first, active in steps:
            now = slice(first, first + active)
            finished.append(state[active:])
            state = state[:active]
            starts[now] = state
            following = decay[now] * state
            if E is not None:
                following += E[now]
            if R is not None:
                errors = U[now] - W[now] @ state
                R[now] = errors
                following += X[now].transpose(-1, -2) @ errors
            state = following
        finished.append(state)
        final = torch.cat(finished[::-1])
        ctx.save_for_backward(W, X, R, decay, starts)
        ctx.steps, ctx.has_E = steps, E is not None
        return starts, R, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_starts: Tensor, grad_R: Any, grad_final: Tensor) -> Any:
        W, X, R, decay, starts = ctx.saved_tensors
        grad_after = torch.empty_like(starts)  # the gradient of the state after each chunk
        dR = None if R is None else torch.empty_like(R)
        grad_state = grad_final[:0]
        for first, active in reversed(ctx.steps):
            now = slice(first, first + active)
            grad_state = torch.cat([grad_state, grad_final[grad_state.shape[0] : active]])
            grad_after[now] = grad_state
            grad_before = decay[now] * grad_state + grad_starts[now]
            if dR is not None:
                grad_errors = grad_R[now] + X[now] @ grad_state
                dR[now] = grad_errors
                grad_before -= W[now].transpose(-1, -2) @ grad_errors
            grad_state = grad_before
        grad_initial = torch.cat([grad_state, grad_final[grad_state.shape[0] :]])
        grad_decay = (grad_after * starts).sum_to_size(decay.shape)
        dW = dX = None
        if dR is not None:
            dW = -(dR @ starts.transpose(-1, -2))
            dX = R @ grad_after.transpose(-1, -2)
        return dR, dW, dX, grad_after if ctx.has_E else None, grad_decay, grad_initial, None


def state_scan(
    decay: Tensor,
    initial: Tensor,
    steps: Steps,
    U: Tensor | None = None,
    W: Tensor | None = None,
    X: Tensor | None = None,
    E: Tensor | None = None,
) -> tuple[Tensor, Any, Tensor]:
    """(states before each chunk `[chunks, H, K, V]`, R `[chunks, H, C, V]` or None, final states `[N, H, K, V]`)."""
    return _StateScan.apply(U, W, X, E, decay, initial, steps)

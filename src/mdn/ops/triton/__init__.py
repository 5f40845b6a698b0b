"""The Triton backend of the momentum delta rule: `forward`, `backward` and `step_` for GPU tensors.

Importing this package does not import Triton; the first call does. What each kernel does: docs/kernels.md.
"""

from __future__ import annotations

from torch import Tensor

from mdn.ops.triton.availability import why_unavailable, why_unsupported

__all__ = ["backward", "forward", "step_", "why_unavailable", "why_unsupported"]


def forward(*arguments, **keywords) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v, p, log_alpha, log_mu, beta, eta, initial_state, boundaries, options, save_residual) ->
    (o, final_state, residual)"""
    from mdn.ops.triton import chunkwise

    return chunkwise.forward(*arguments, **keywords)


def backward(*arguments, **keywords) -> tuple[Tensor | None, ...]:
    """(grad_o, grad_final_state, q, k, v, p, log_alpha, log_mu, beta, eta, initial_state, residual, boundaries,
    options) -> (dq, dk, dv, dp, dlog_alpha, dlog_mu, dbeta, deta, dinitial_state)"""
    from mdn.ops.triton import chunkwise

    return chunkwise.backward(*arguments, **keywords)


def step_(*arguments, **keywords) -> Tensor:
    """(q, k, v, p, log_alpha, log_mu, beta, eta, S, M, state_indices, options) -> o; S and M change in place."""
    from mdn.ops.triton import decode

    return decode.step_(*arguments, **keywords)

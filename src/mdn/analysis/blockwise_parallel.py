"""Blockwise momentum, a whole block at a time: the same result as the loop ``mdn.ops.blockwise_momentum_delta_rule``.

All errors of a block are taken at the state that began it, so there is no triangular system. With the coefficients of
the exact chunk form, S0 and M0 the states before the block, and Khat = diag(eta) K:

    R = V - P S0;   O = abar Q S0 - b Q M0 + ((Q Khat^T) * Gamma) R
    S' = abar_C S0 - b_C M0 + (Gamma_C Khat)^T R;   M' = mbar_C M0 - (L_mu,C Khat)^T R

Shapes as in ``mdn.ops``; differentiated by autograd; dense batches only. It makes training with blocks quick enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn import ops
from mdn.ops.momentum_delta_rule.options import RuleOptions
from mdn.ops.momentum_delta_rule.recurrent import effective_inputs


def _segment_decay(log_gate: Tensor) -> Tensor:
    """``[Z, C]`` to ``[Z, C+1, C+1]``: products over segments j+1..i, row and column 0 being the block's start."""
    padded = F.pad(log_gate, (1, 0))
    inside = padded.unsqueeze(-1).expand(-1, -1, padded.shape[1]).tril(-1)
    return inside.cumsum(-2).exp().tril()


def blockwise_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    p: Tensor | None = None,
    beta: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    block_size: int,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    use_p_times_alpha: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, HV, V]`` and the final state ``[2, B, HV, K, V]`` or None; q, k, p are L2-normalised here."""
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens is not supported by the parallel blockwise form; use a dense batch")
    batch, time, heads = v.shape[:3]
    beta, eta = (torch.ones_like(log_alpha) if gate is None else gate for gate in (beta, eta))
    options = RuleOptions(q.shape[-1] ** -0.5, 1, True, use_p_times_alpha)
    query, key, probe = effective_inputs(q, k, p, log_alpha, heads, options)

    def blocks(x: Tensor) -> Tensor:
        """``[B, T, HV, ...]`` to ``[n, B HV, C, ...]``; the end is filled with tokens that change nothing."""
        x = F.pad(x.transpose(0, 1).flatten(1, 2).transpose(0, -1), (0, -time % block_size)).transpose(0, -1)
        return x.unflatten(0, (-1, block_size)).transpose(1, 2)

    query, key, value, probe = map(blocks, (query, key, v.to(query.dtype), probe))
    log_alpha, log_mu, beta, eta = (blocks(x.to(query.dtype)) for x in (log_alpha, log_mu, beta, eta))
    shape = (*log_alpha.shape[:2], block_size + 1, block_size + 1)
    decay_alpha, decay_mu = (_segment_decay(x.flatten(0, 1)).view(shape) for x in (log_alpha, log_mu))
    gamma = decay_alpha[..., 1:] @ (beta.unsqueeze(-1) * decay_mu[..., 1:, :])
    key = key * eta.unsqueeze(-1)
    if initial_state is None:
        initial_state = value.new_zeros(2, batch, heads, key.shape[-1], value.shape[-1])
    fast_weight, momentum = initial_state.to(value.dtype).flatten(1, 2).unbind(0)
    outputs = []
    for n in range(len(key)):
        error = value[n] - probe[n] @ fast_weight
        carried = decay_alpha[n, :, 1:, :1] * query[n] @ fast_weight - gamma[n, :, 1:, :1] * query[n] @ momentum
        outputs.append(carried + (query[n] @ key[n].mT * gamma[n, :, 1:, 1:]) @ error)
        last = (n, slice(None), -1)
        write = (gamma[last][:, 1:].unsqueeze(-1) * key[n]).mT @ error
        start_weight, start_momentum = (x[last][:, :1].unsqueeze(-1) for x in (decay_alpha, gamma))
        after_weight = start_weight * fast_weight - start_momentum * momentum + write
        into_momentum = (decay_mu[last][:, 1:].unsqueeze(-1) * key[n]).mT @ error
        momentum = decay_mu[last][:, :1].unsqueeze(-1) * momentum - into_momentum
        fast_weight = after_weight
    o = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:time].unflatten(1, (batch, heads)).transpose(0, 1)
    state = torch.stack([fast_weight, momentum]).unflatten(1, (batch, heads))
    return o.to(v.dtype), state if output_final_state else None


@contextmanager
def parallel_blocks() -> Iterator[None]:
    """Inside, layers with ``momentum_block_size > 1`` use this form."""
    loop = ops.blockwise_momentum_delta_rule
    ops.blockwise_momentum_delta_rule = blockwise_parallel  # type: ignore[assignment]
    try:
        yield
    finally:
        ops.blockwise_momentum_delta_rule = loop

"""Blockwise momentum: every error of a block is taken at the state that began it, so there is no triangular system.

With the coefficients of ``coefficients.py`` for a block of C tokens, S0, M0 the states before it, Khat = diag(eta) K:

    R  = V - P S0
    O  = abar Q S0 - b Q M0 + ((Q Khat^T) * Gamma) R
    S' = abar_C S0 - b_C M0 + (Gamma_C Khat)^T R
    M' = mbar_C M0 - (L_mu,C Khat)^T R

Differentiated by autograd. Shapes as in ``recurrent.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.momentum.coefficients import momentum_coefficients


def blockwise_pass(streams: list[Tensor], state: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """o ``[B, T, HV, V]`` and the final state ``[2, B, HV, K, V]`` of q, k, v, p and the four gates."""
    batch, time, heads = streams[0].shape[:3]
    size = max(1, min(block_size, time))
    query, key, value, probe, log_alpha, log_mu, beta, eta = (_blocks(x, size) for x in streams)
    gates = [x.flatten(0, 1) for x in (log_alpha, log_mu, beta, eta)]
    coefficients = momentum_coefficients(gates[0], gates[1], gates[2], gates[3])
    of_blocks = (coefficients.decay_alpha, coefficients.decay_mu, coefficients.written, coefficients.gamma)
    decay_alpha, decay_mu, written, gamma = (x.unflatten(0, log_alpha.shape[:2]) for x in of_blocks)
    attend = query @ key.mT * gamma[..., 1:, 1:]
    read_fast_weight, read_momentum = (x[..., 1:, :1] * query for x in (decay_alpha, gamma))
    to_fast_weight, to_momentum = (x[..., -1, 1:].unsqueeze(-1) * key for x in (gamma, written))
    keep_fast_weight, leak_momentum, keep_momentum = (x[..., -1:, :1] for x in (decay_alpha, gamma, decay_mu))

    fast_weight, momentum = state.flatten(1, 2).unbind(0)
    outputs = []
    for n in range(len(key)):
        error = value[n] - probe[n] @ fast_weight
        outputs.append(read_fast_weight[n] @ fast_weight - read_momentum[n] @ momentum + attend[n] @ error)
        fast_weight = keep_fast_weight[n] * fast_weight - leak_momentum[n] * momentum + to_fast_weight[n].mT @ error
        momentum = keep_momentum[n] * momentum - to_momentum[n].mT @ error
    final_state = torch.stack([fast_weight, momentum]).unflatten(1, (batch, heads))
    if not outputs:
        return torch.empty_like(streams[2]), final_state
    o = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:time]  # [T, B HV, V]
    return o.unflatten(1, (batch, heads)).transpose(0, 1), final_state


def _blocks(x: Tensor, size: int) -> Tensor:
    """``[B, T, HV, ...]`` to ``[n, B HV, C, ...]``; the end is filled with tokens that change nothing: zeros."""
    tokens_first = x.transpose(0, 1).flatten(1, 2)
    padding = (0, 0) * (tokens_first.dim() - 1) + (0, -len(tokens_first) % size)
    return F.pad(tokens_first, padding).unflatten(0, (-1, size)).transpose(1, 2)

"""The first-order rules one token at a time: the definition, and the step that decodes.

Both compute, per head, with ``e = -beta k`` unless it is given:

    probed = S^T p;   S <- alpha * S + beta k v^T + e probed^T;   o = S^T q            without p nothing is probed
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.inputs import PreparedTensors
from mdn.ops.shared_checks import without_autocast


def recurrent_form(
    x: PreparedTensors, initial_state: Tensor, boundaries: SequenceBoundaries | None
) -> tuple[Tensor, Tensor]:
    """The rule as its authors define it, token by token: slow, clear, differentiable any number of times.

    Outputs ``[B, T, HV, V]`` and final states ``[N, HV, K, V]``. The rows of a batch go side by side, the sequences of
    a pack one after the other.
    """
    if boundaries is None:
        sequences = [(slice(None), 0, x.q.shape[1])]
    else:
        sequences = [(slice(n, n + 1), *ends) for n, ends in enumerate(pairwise(boundaries.offsets))]
    outputs, finals = [x.v[:, :0]], []
    with without_autocast(x.v):
        for states, start, end in sequences:
            S = initial_state[states]
            for t in range(start, end):
                token = x.token(t)
                S = _next_state(S, token)
                outputs.append(_read(S, token.q).unsqueeze(1))
            finals.append(S)
        return torch.cat(outputs, 1), torch.cat(finals)


def _next_state(S: Tensor, x: PreparedTensors) -> Tensor:
    alpha = x.log_alpha.exp()
    decayed = alpha.reshape(*S.shape[:2], -1, 1) * S
    write = x.k if x.beta is None else x.beta.unsqueeze(-1) * x.k
    if x.p is None:
        return decayed + _outer(write, x.v)
    if x.erase_key is None:
        return decayed + _outer(write, x.v - _read(S, x.p))
    return decayed + _outer(write, x.v) + _outer(x.erase_key, _read(S, x.p))


def _read(S: Tensor, key: Tensor) -> Tensor:
    """S^T key: ``[B, HV, K, V]``, ``[B, HV, K]`` -> ``[B, HV, V]``."""
    return torch.einsum("bhkv,bhk->bhv", S, key)


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key.unsqueeze(-1) * value.unsqueeze(-2)


def step_(x: PreparedTensors, state: Tensor, state_indices: Tensor | None, scale: float) -> Tensor:
    """One token, ``[B, HV, D]``; ``state`` ``[slots, HV, K, V]`` changes in place. Returns o = scale * S^T q."""
    batch, heads, key_dim, value_dim = *x.k.shape, x.v.shape[-1]
    S = state if state_indices is None else state.index_select(0, state_indices)
    S = S.contiguous().view(batch * heads, key_dim, value_dim)
    q, k, v = x.q.reshape(-1, 1, key_dim), x.k.reshape(-1, key_dim, 1), x.v.reshape(-1, 1, value_dim)
    probed = None if x.p is None else x.p.reshape(-1, 1, key_dim) @ S
    if x.beta is not None:
        k = x.beta.reshape(-1, 1, 1) * k
    if probed is not None and x.erase_key is None:
        v = v - probed
    S.mul_(x.log_alpha.exp().reshape(batch * heads, -1, 1)).baddbmm_(k, v)
    if probed is not None and x.erase_key is not None:
        S.baddbmm_(x.erase_key.reshape(-1, key_dim, 1), probed)
    o = torch.baddbmm(v, q, S, beta=0, alpha=scale).view(batch, heads, value_dim)  # beta=0: v lends its shape only
    if state_indices is not None:
        state.index_copy_(0, state_indices, S.view(batch, heads, key_dim, value_dim))
    elif not state.is_contiguous():
        state.copy_(S.view(state.shape))
    return o

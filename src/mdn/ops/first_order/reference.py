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
from mdn.ops.momentum.reference import read
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
    outputs, finals = [x.v[:, :0]], [initial_state[:0]]
    with without_autocast(x.v):
        for states, start, end in sequences:
            S = initial_state[states]
            for t in range(start, end):
                token = x.token(t)
                S = _next_state(S, token)
                outputs.append(read(S, token.q).unsqueeze(1))
            finals.append(S)
        return torch.cat(outputs, 1), torch.cat(finals)


def _next_state(S: Tensor, x: PreparedTensors) -> Tensor:
    decayed = _of_rows(x.log_alpha.exp()) * S
    write = x.k if x.beta is None else x.beta.unsqueeze(-1) * x.k
    if x.p is None:
        return decayed + _outer(write, x.v)
    if x.erase_key is None:
        return decayed + _outer(write, x.v - read(S, x.p))
    return decayed + _outer(write, x.v) + _outer(x.erase_key, read(S, x.p))


def _of_rows(decay: Tensor) -> Tensor:
    """``[B, HV]`` or ``[B, HV, K]`` as a factor of the rows of S, ``[B, HV, 1 or K, 1]``."""
    return decay.unsqueeze(-1) if decay.dim() == 3 else decay[..., None, None]


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key.unsqueeze(-1) * value.unsqueeze(-2)


def step_(x: PreparedTensors, state: Tensor, state_indices: Tensor | None, scale: float) -> Tensor:
    """One token, ``[B, HV, D]``; ``state`` ``[slots, HV, K, V]`` changes in place. Returns o = scale * S^T q."""
    S = state if state_indices is None else state.index_select(0, state_indices)
    q, k, v = x.q.unsqueeze(-2), x.k.unsqueeze(-1), x.v.unsqueeze(-2)  # [B, HV, 1, K], [.., K, 1], [.., 1, V]
    if x.beta is not None:
        k = x.beta[..., None, None] * k
    probed = None if x.p is None else x.p.unsqueeze(-2) @ S  # [B, HV, 1, V]
    if probed is not None and x.erase_key is None:
        v = v - probed
    S.mul_(_of_rows(x.log_alpha.exp())).addcmul_(k, v)
    if probed is not None and x.erase_key is not None:
        S.addcmul_(x.erase_key.unsqueeze(-1), probed)
    if state_indices is not None:
        state.index_copy_(0, state_indices, S)
    return scale * (q @ S).squeeze(-2)

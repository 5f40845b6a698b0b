"""The first-order rules as their authors define them: one token after another. Slow, clear, differentiable.

Two definitions cover all of them; both take and return what the chunkwise forms do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from .inputs import Inputs


def recurrent_scalar_decay(
    inputs: Inputs, p: Tensor | None, log_decay: Tensor, beta: Tensor, read_decayed: bool = False
) -> tuple[Tensor, Tensor]:
    """r = v - S^T p (without p: v);  S <- exp(g) S + beta k r^T;  o = S^T q.   read_decayed: r = v - (exp(g) S)^T p."""

    def update(state: Tensor, t: int) -> Tensor:
        kept = log_decay[:, t, :, None, None].exp() * state
        error = inputs.v[:, t] if p is None else inputs.v[:, t] - _read(kept if read_decayed else state, p[:, t])
        return kept + _outer(beta[:, t].unsqueeze(-1) * inputs.k[:, t], error)

    return _run(inputs, update)


def recurrent_vector_decay(
    inputs: Inputs, log_decay: Tensor, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x = S^T a;  S <- diag(exp g) S + k v^T + b x^T;  o = S^T q. Without b, b is -k; without a, there is no x."""

    def update(state: Tensor, t: int) -> Tensor:
        key, value = inputs.k[:, t], inputs.v[:, t]
        kept = log_decay[:, t].exp().unsqueeze(-1) * state
        if a is None:
            return kept + _outer(key, value)
        read = _read(state, a[:, t])
        return kept + _outer(key, value) + _outer(-key if b is None else b[:, t], read)

    return _run(inputs, update)


def _run(inputs: Inputs, update: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """All rows of a batch side by side, or the sequences of a pack one after the other."""
    if inputs.boundaries is None:
        sequences = [(slice(None), 0, inputs.q.shape[1])]
    else:
        offsets = inputs.boundaries.offsets
        sequences = [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairwise(offsets))]
    outputs, finals = [inputs.v[:, :0]], []
    with torch.autocast(inputs.v.device.type, enabled=False):
        for states, start, end in sequences:
            state = inputs.initial_state[states]
            for t in range(start, end):
                state = update(state, t)
                outputs.append(_read(state, inputs.q[:, t]).unsqueeze(1))
            finals.append(state)
        return torch.cat(outputs, 1), torch.cat(finals)


def _read(state: Tensor, key: Tensor) -> Tensor:
    """S^T k: state `[B, HV, K, V]`, key `[B, HV, K]` -> `[B, HV, V]`."""
    return torch.einsum("bhkv,bhk->bhv", state, key)


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key.unsqueeze(-1) * value.unsqueeze(-2)

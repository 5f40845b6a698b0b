"""A NaN or inf in one token must not reach the earlier tokens of its chunk.

Inside a chunk a later token has weight zero in an earlier output, and 0 * NaN is NaN. What is not finite also stays in
the state for good, even at a decay of zero. So if a final state is not finite (one sum shows it), the rule is computed
once more without the damaged numbers, and then everything that the recurrence would lose is made NaN: all from the
damaged token on, or one column of it if only v was damaged. A column of a final state becomes NaN in every row, also
where the recurrence would keep a number: whatever reads that column is NaN either way. On a CPU only: a GPU would have
to wait for the host, and a compiler cannot trace it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.shared_checks import values_can_be_read

DAMAGING = ("k", "p", "erase_key")
"""the vectors ``[B, T, H, K]`` of a token that reach the state, where a rule has them; v reaches it too"""
Tensors = TypeVar("Tensors", bound=Any)
"""the named tuple of one call's tensors, of either family of rules"""


def contain_damage(
    compute: Callable[[Tensors], tuple[Tensor, ...]], tensors: Tensors, boundaries: SequenceBoundaries | None
) -> tuple[Tensor, ...]:
    """``compute`` once, or once more without damaged numbers: o ``[B, T, HV, V]``, the final states ``[..., N, HV, K,
    V]``, and what else ``compute`` returns in the shape of o. Tensors that are not needed are empty."""
    result = compute(tensors)
    if not looks_damaged(result[1]):
        return result
    vectors = {name: x for name in DAMAGING if (x := getattr(tensors, name, None)) is not None}
    damage = damage_of(tensors.v, vectors.values(), boundaries)
    if not bool(damage.isnan().any()):
        return result  # the rule itself has diverged, or q was damaged, which concerns its own token only
    again = {"v": tensors.v, **vectors}
    o, final_state, *others = compute(tensors._replace(**{name: repaired(x) for name, x in again.items()}))
    o, *others = (x + damage if x.numel() else x for x in (o, *others))
    return o, final_state + at_the_end(damage, boundaries).unsqueeze(-2), *others


def looks_damaged(final_state: Tensor) -> bool:
    """Whether a state is not finite, where that can be found out cheaply."""
    if not values_can_be_read(final_state):
        return False
    return not math.isfinite(final_state.detach().sum().item())


def damage_of(v: Tensor, keys: Iterable[Tensor], boundaries: SequenceBoundaries | None) -> Tensor:
    """``[B, T, HV, V]``: NaN from the first damaged token of a sequence on, 0 before it. ``keys``: [B, T, H, K]."""
    damage = 0.0 * v
    for x in keys:
        of_head = (0.0 * x).sum(-1, keepdim=True)
        damage = damage + of_head.repeat_interleave(v.shape[2] // x.shape[2], dim=2)
    if boundaries is None:
        return damage.cumsum(1)
    return torch.cat([damage[:, start:end].cumsum(1) for start, end in pairwise(boundaries.offsets)], 1)


def at_the_end(damage: Tensor, boundaries: SequenceBoundaries | None) -> Tensor:
    """``[N, HV, V]``: the damage after the last token of every sequence; none in a sequence without tokens."""
    if boundaries is None:
        return damage[:, -1]
    untouched = damage.new_zeros(1, *damage.shape[2:])
    last = [end - 1 if end > start else -1 for start, end in pairwise(boundaries.offsets)]
    return torch.cat([damage[0], untouched])[last]


def repaired(x: Tensor) -> Tensor:
    """Zeros where a number is not finite: such a token writes nothing."""
    return torch.where(x.isfinite(), x, 0.0)

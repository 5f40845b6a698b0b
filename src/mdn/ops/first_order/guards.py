"""What keeps a chunkwise form from answering wrongly in silence: non-finite inputs, forward-mode derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.inputs import FirstOrderTensors, expand_heads
from mdn.ops.shared_checks import has_tangents

Computed = tuple[Tensor, Tensor]
"""outputs [B, T, HV, V] and final states [N, HV, K, V]"""


def contain_damage(
    compute: Callable[[FirstOrderTensors], Computed],
    tensors: FirstOrderTensors,
    boundaries: SequenceBoundaries | None,
) -> Computed:
    """A NaN or inf in k, v, p or e does not reach the earlier tokens of its chunk.

    Inside a chunk a later token has weight zero in an earlier output, and 0 * NaN is NaN. So if an output is not finite
    (one sum tells), the rule is computed once more without the damaged numbers, and then everything that the recurrence
    loses is made NaN: all from the damaged token on, or one column of it if only v was damaged. On a CPU only: a GPU
    would have to wait for the host, and a compiler cannot trace it.
    """
    o, final = compute(tensors)
    if o.device.type != "cpu" or torch.compiler.is_compiling() or math.isfinite(o.detach().sum().item()):
        return o, final
    damage = _damage(tensors, boundaries).to(o.dtype)
    if not bool(damage.isnan().any()):
        return o, final  # the rule itself has diverged, or q was damaged, which concerns its own token only
    k, v, p, e = (None if x is None else torch.where(x.isfinite(), x, 0.0) for x in _written(tensors))
    assert k is not None
    assert v is not None
    o, final = compute(tensors._replace(k=k, v=v, p=p, erase_key=e))
    if boundaries is None:
        return o + damage, final + damage[:, -1].unsqueeze(-2)
    untouched = damage.new_zeros(1, *damage.shape[2:])  # for sequences without tokens
    last = [end - 1 if end > start else -1 for start, end in pairwise(boundaries.offsets)]
    return o + damage, final + torch.cat([damage[0], untouched])[last].unsqueeze(-2)


def _written(tensors: FirstOrderTensors) -> tuple[Tensor | None, ...]:
    """Everything that can enter the state; gates were checked before."""
    return tensors.k, tensors.v, tensors.p, tensors.erase_key


def _damage(tensors: FirstOrderTensors, boundaries: SequenceBoundaries | None) -> Tensor:
    """``[B, T, HV, V]``: NaN from the first damaged token of a sequence on, 0 before it."""
    damage = 0.0 * tensors.v
    for x in (tensors.k, tensors.p, tensors.erase_key):
        if x is not None:
            damage = damage + expand_heads((0.0 * x).sum(-1, keepdim=True), damage.shape[2])
    if boundaries is None:
        return damage.cumsum(1)
    return torch.cat([damage[:, start:end].cumsum(1) for start, end in pairwise(boundaries.offsets)], 1)


def refuse_transforms(function: str, instead: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Forward-mode derivatives and ``torch.func`` cannot see into a hand-written backward pass or a native kernel."""
    if torch.compiler.is_compiling():
        return
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or (forward_ad._current_level >= 0 and has_tangents(tensors)):
        what = "torch.func transforms" if transformed else "forward-mode derivatives"
        raise NotImplementedError(f"{function} does not support {what}; {instead} does")

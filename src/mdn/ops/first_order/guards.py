"""What keeps a chunkwise form from answering wrongly in silence: non-finite inputs, forward-mode derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.containment import at_the_end, damage_of, looks_damaged, repaired
from mdn.ops.first_order.inputs import FirstOrderTensors
from mdn.ops.shared_checks import has_tangents

Computed = tuple[Tensor, Tensor]
"""outputs [B, T, HV, V], or an empty tensor if they are not needed, and final states [N, HV, K, V]"""


def contain_damage(
    compute: Callable[[FirstOrderTensors], Computed],
    tensors: FirstOrderTensors,
    boundaries: SequenceBoundaries | None,
) -> Computed:
    """``compute`` once, or once more without damaged numbers (mdn.ops.containment): k, v, p and e are looked at."""
    o, final = compute(tensors)
    if not looks_damaged(final):
        return o, final
    damage = damage_of(tensors.v, (tensors.k, tensors.p, tensors.erase_key), boundaries).to(o.dtype)
    if not bool(damage.isnan().any()):
        return o, final  # the rule itself has diverged, or q was damaged, which concerns its own token only
    p, e = (None if x is None else repaired(x) for x in (tensors.p, tensors.erase_key))
    o, final = compute(tensors._replace(k=repaired(tensors.k), v=repaired(tensors.v), p=p, erase_key=e))
    return o + damage if o.numel() else o, final + at_the_end(damage, boundaries).unsqueeze(-2)


def refuse_transforms(function: str, instead: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Forward-mode derivatives and ``torch.func`` cannot see into a hand-written backward pass or a native kernel."""
    if torch.compiler.is_compiling():
        return
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or (forward_ad._current_level >= 0 and has_tangents(tensors)):
        what = "torch.func transforms" if transformed else "forward-mode derivatives"
        raise NotImplementedError(f"{function} does not support {what}; {instead} does")

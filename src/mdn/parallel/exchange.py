"""The exchange of affine maps: every range gets the state that arrives from the left, and in the backward pass every
range gets the gradient that arrives from the right.

Range i maps the state before it to the state after it, X_{i+1} = A_i X_i + E_i (X_0 = 0). With F_i the gradient of the
loss with respect to X_i from the tokens of range i alone, the whole gradient is G_i = F_i + A_i^T G_{i+1}: the same
chain of affine maps, transposed and from right to left, and G_{i+1} is what the backward pass of range i starts from.

Maps are gathered among the ranks of a node; each node composes its own and the nodes gather the results. ``transits``
of the plan says which A are not zero: others are never multiplied, so that nothing of one document reaches another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mdn.parallel.collectives import Group, all_gather, two_levels

if TYPE_CHECKING:
    from mdn.parallel.plan import ContextParallelPlan


class AffineMap(NamedTuple):
    """X' = E + A X."""

    E: Tensor
    """[HV, rows, V]"""
    A: Tensor | None
    """[HV, rows, rows]; None means zero"""

    def of(self, X: Tensor | None) -> Tensor:
        """``X`` None means zero."""
        return self.E if self.A is None or X is None else torch.baddbmm(self.E, self.A, X)


class Chain:
    """The order of ranges, by nodes, and what of the maps this rank has gathered.

    ``near_A [node size, slots, HV, rows, rows]`` are those of its own node, ``far_A [nodes, slots, ...]`` the composed
    ones of all nodes; both are None if no state passes through a whole range.
    """

    def __init__(self, plan: ContextParallelPlan):
        self.plan = plan
        self.nodes = plan.ranks // plan.node
        self.node, self.member = divmod(plan.rank, plan.node)
        self.near_A: Tensor | None = None
        self.far_A: Tensor | None = None
        self.groups: tuple[Group, Group] = two_levels(plan.group, plan.node)

    # ---------------------------------------------------------------- order

    def blocks(self, reverse: bool) -> list[tuple[int, int]]:
        """(slot, node) in the order of the row: neighbouring ranges that one node holds."""
        order = [(0, node) for node in range(self.nodes)]
        if self.plan.slots == 2:
            order += [(1, node) for node in reversed(range(self.nodes))]
        return order[::-1] if reverse else order

    def members(self, slot: int, reverse: bool) -> list[int]:
        """The ranks of a node in the order of their ranges in a slot."""
        order = list(range(self.plan.node))
        return order[::-1] if (slot == 1) != reverse else order

    def transits(self, slot: int, node: int, member: int) -> bool:
        return self.plan.transits[self.plan.range_of(node * self.plan.node + member, slot)]

    def block_transits(self, slot: int, node: int) -> bool:
        return all(self.transits(slot, node, member) for member in range(self.plan.node))

    # ---------------------------------------------------------------- maps

    def near_map(self, E: Tensor, slot: int, member: int, reverse: bool) -> AffineMap:
        A = self.near_A[member, slot] if self.near_A is not None and self.transits(slot, self.node, member) else None
        return AffineMap(E[member, slot], A.mT if A is not None and reverse else A)

    def far_map(self, E: Tensor, slot: int, node: int, reverse: bool) -> AffineMap:
        A = self.far_A[node, slot] if self.far_A is not None and self.block_transits(slot, node) else None
        return AffineMap(E[node, slot], A.mT if A is not None and reverse else A)

    def gather(self, E: Tensor, A: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
        """E of the ranges of this node and of the blocks of all nodes. ``A`` is given in the forward pass, and kept."""
        inside, across = self.groups
        width = E.shape[-1]
        near = all_gather(E if A is None else torch.cat([E, A], -1), inside)
        near_E = near[..., :width]
        if A is not None:
            self.near_A = near[..., width:]
        if self.nodes == 1 and self.plan.slots == 1:
            return near_E, near_E[:1]  # one block, before which there is nothing
        own = [self.compose(near_E, slot, reverse) for slot in range(self.plan.slots)]
        block = torch.stack([composed.E for composed in own])
        if A is not None:
            block_A = [torch.zeros_like(A[0]) if composed.A is None else composed.A for composed in own]
            block = torch.cat([block, torch.stack(block_A)], -1)
        far = all_gather(block, across) if self.nodes > 1 else block.unsqueeze(0)
        if A is not None:
            self.far_A = far[..., width:]
        return near_E, far[..., :width]

    def compose(self, near_E: Tensor, slot: int, reverse: bool) -> AffineMap:
        """The map of this node's block in a slot; its A only in the forward pass, in the backward pass it is known."""
        order = self.members(slot, reverse)
        maps = [self.near_map(near_E, slot, member, reverse) for member in order]
        E = _through(None, maps)
        assert E is not None
        if reverse or self.near_A is None or not self.block_transits(slot, self.node):
            return AffineMap(E, None)
        A = self.near_A[order[0], slot]
        for member in order[1:]:
            A = self.near_A[member, slot] @ A
        return AffineMap(E, A)

    def arriving(self, near_E: Tensor, far_E: Tensor, slot: int, reverse: bool) -> Tensor:
        """What arrives at this rank's range of a slot: through all blocks before its own, then inside that one."""
        blocks = self.blocks(reverse)
        before = blocks[: blocks.index((slot, self.node))]
        X = _through(None, (self.far_map(far_E, *block, reverse) for block in before))
        order = self.members(slot, reverse)
        ahead = order[: order.index(self.member)]
        X = _through(X, (self.near_map(near_E, slot, member, reverse) for member in ahead))
        return torch.zeros_like(near_E[0, 0]) if X is None else X


def _through(X: Tensor | None, maps: Iterable[AffineMap]) -> Tensor | None:
    for step in maps:
        X = step.of(X)
    return X


class Exchanged:
    """What has arrived at this rank's ranges, and the way back for gradients."""

    def __init__(self, E: Tensor, A: Tensor, plan: ContextParallelPlan):
        """E ``[slots, HV, rows, V]`` and A ``[slots, HV, rows, rows]`` are the maps of this rank's ranges."""
        self.chain = Chain(plan)
        near_E, far_E = self.chain.gather(E, A if any(plan.transits) else None, reverse=False)
        self.states = torch.stack(
            [
                self.chain.arriving(near_E, far_E, slot, reverse=False)
                if plan.continues[number]
                else torch.zeros_like(E[slot])
                for slot, number in enumerate(plan.own_ranges)
            ]
        )
        """``[slots, HV, rows, V]``: the states before this rank's ranges"""

    def gradients(self, F: Tensor) -> Tensor:
        """``[slots, HV, rows, V]``: the gradients of the states after this rank's ranges.

        F ``[slots, HV, rows, V]``: what its own tokens contribute to the gradients of the states before them. All ranks
        call it.
        """
        near_F, far_F = self.chain.gather(F, None, reverse=True)
        slots = range(self.chain.plan.slots)
        return torch.stack([self.chain.arriving(near_F, far_F, slot, reverse=True) for slot in slots])

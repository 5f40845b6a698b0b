"""Collectives of one process group, with their gradients: the loss that is differentiated is the sum over all ranks.

A group of one process (or no process group at all) needs no communication, so everything works in a single process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


class Traffic:
    """For measurements: bytes that this process has received in the collectives below."""

    received = 0


def group_size(group: Group) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def group_rank(group: Group) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def all_gather(x: Tensor, group: Group) -> Tensor:
    """``[...]`` of every rank, stacked: ``[ranks, ...]``. No gradient."""
    ranks = group_size(group)
    if ranks == 1:
        return x.unsqueeze(0)
    gathered = x.new_empty(ranks, *x.shape)
    Traffic.received += gathered.nbytes - x.nbytes
    dist.all_gather_single(gathered.view(-1), x.flatten(), group=group)
    return gathered


class _AllGather(torch.autograd.Function):
    """Backward: every rank's gradient of this rank's part, summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if grad.shape[0] == 1:
            return grad[0], None
        own = grad.new_empty(grad.shape[1:])
        Traffic.received += grad.nbytes - own.nbytes
        dist.reduce_scatter_single(own.view(-1), grad.flatten(), group=ctx.group)
        return own, None


class _AllReduce(torch.autograd.Function):
    """The sum over ranks. Backward: the sum of all ranks' gradients, which is what every rank's summand receives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = x.clone()
        if group_size(group) > 1:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllReduce.apply(grad, ctx.group), None


def gather_with_gradient(x: Tensor, group: Group) -> Tensor:
    gathered: Tensor = _AllGather.apply(x, group)
    return gathered


def sum_with_gradient(x: Tensor, group: Group) -> Tensor:
    total: Tensor = _AllReduce.apply(x, group)
    return total


@cache
def two_levels(group: Group, node: int) -> tuple[Group, Group]:
    """The groups of this rank: with its node (``node`` neighbouring ranks), and with its counterparts on all nodes."""
    if node == group_size(group):
        return group, None
    assert group is not None
    members = dist.get_process_group_ranks(group)
    here = group_rank(group)
    first = here - here % node
    inside = dist.new_group(members[first : first + node], use_local_synchronization=True)
    across = dist.new_group(members[here % node :: node], use_local_synchronization=True)
    return inside, across

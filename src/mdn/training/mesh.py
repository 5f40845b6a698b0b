"""How the processes of a run are arranged: data x context x tensor, the last one running fastest.

Ranks that differ in `data` train on different rows, those that differ in `context` hold different tokens of the same
rows (mdn.parallel), and those that differ in `tensor` hold different heads of the same tokens. Parameters are copied
or sharded over data x context as `distributed.strategy` says.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mdn.parallel import ContextParallelPlan
from mdn.parallel.plan import RANGES_PER_RANK
from mdn.training.recipe import DistributedSettings


class MeshShape(NamedTuple):
    data: int
    context: int
    tensor: int

    def __str__(self) -> str:
        return f"data {self.data} x context {self.context} x tensor {self.tensor}"


def mesh_shape(settings: DistributedSettings, ranks: int) -> MeshShape:
    """The arrangement of so many processes; a ValueError if they do not fit."""
    model = settings.context_parallel * settings.tensor_parallel
    if ranks % model:
        raise ValueError(
            f"distributed.context_parallel={settings.context_parallel} x distributed.tensor_parallel="
            f"{settings.tensor_parallel} must divide the number of ranks, got {ranks}"
        )
    return MeshShape(ranks // model, settings.context_parallel, settings.tensor_parallel)


class LocalBatch(NamedTuple):
    """A batch as this rank sees it. Its loss counts `weight` times in a sum over the ranks of a context group."""

    inputs: dict[str, Any]
    labels: Tensor
    weight: float


class RankMesh:
    """This process's place in the arrangement, and the groups it belongs to. One process needs no process group."""

    def __init__(self, settings: DistributedSettings, ranks: int, device: str = "cpu") -> None:
        self.shape = mesh_shape(settings, ranks)
        self.layout = settings.context_layout
        rank = int(os.environ.get("RANK", "0"))
        self.data_rank = rank // (self.shape.context * self.shape.tensor)
        self.context: dist.ProcessGroup | None = None
        self.copies: dist.ProcessGroup | None = None
        """the ranks with the same heads, over which gradients are averaged"""
        self.tensor: Any = None
        """the mesh of the ranks with the same tokens"""
        if self.shape.context * self.shape.tensor > 1:
            mesh = init_device_mesh(device, tuple(self.shape), mesh_dim_names=self.shape._fields)
            self.context, self.tensor = mesh["context"].get_group(), mesh["tensor"]
            self.copies = mesh["data", "context"]._flatten().get_group()

    def local(self, batch: dict[str, Tensor]) -> LocalBatch:
        """This rank's tokens of a batch with `input_ids`, `shift_labels` and, for a pack, `cu_seqlens`."""
        labels = batch["shift_labels"]
        inputs: dict[str, Any] = {key: batch[key] for key in ("input_ids", "cu_seqlens") if key in batch}
        if self.shape.context == 1:
            return LocalBatch(inputs, labels, 1.0)
        if labels.numel() < self.shape.context * RANGES_PER_RANK[self.layout]:  # too short to be cut
            return LocalBatch(inputs, labels, 1 / self.shape.context)
        rows, length = labels.shape
        boundaries = inputs.pop("cu_seqlens", None)
        if boundaries is None:
            boundaries = torch.arange(rows + 1, device=labels.device) * length
        plan = ContextParallelPlan.from_cu_seqlens(boundaries, self.context, self.layout)
        ids, targets = (plan.scatter(x.reshape(1, -1)) for x in (inputs["input_ids"], labels))
        return LocalBatch({"input_ids": ids, "context_parallel": plan}, targets, 1.0)

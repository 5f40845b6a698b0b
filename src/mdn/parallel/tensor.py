"""Tensor parallelism: every rank computes some of the heads, through transformers' own mechanism (``tp_plan``).

Projections to heads are cut by columns and the output projection by rows, as transformers does it. What belongs to a
head follows it, in styles that are registered here:

    mdn_heads      the mixer: its parameters with an entry per head (A_log, dt_bias, ...) are cut, and it counts the
                   heads of this rank
    mdn_columns    a projection to heads that may be low-rank: of two maps the second is cut, the first is whole
    mdn_channels   a short convolution: its channels are cut
    mdn_shared     a norm or a map that all heads share: every rank has it whole, and its gradient is summed over the
                   ranks

Embeddings, norms between blocks and the output head are whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    TensorParallelLayer,
    apply_tensor_parallelism,
)

from mdn.layers import MIXERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _PartsOfHeads(TensorParallelLayer):
    """Own parameters are cut along their first dimension; the forward pass sees this rank's part as plain tensors."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        full = module._parameters.get(param)
        if full is not None:
            part = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(part, requires_grad=full.requires_grad)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        module.keep_part(mesh.size())
        installed: nn.Module = super().install_forward(module, mesh)
        return installed


class _ColumnsOfLast(ColwiseParallel):
    """transformers' style for a linear map; of an ``nn.Sequential`` it is applied to the last one. What comes before is
    the same on every rank and gets whole gradients, because the cut map sums those of its input."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Sequential):
            module = module[-1]
            for name in list(module._parameters):
                self.shard_param(module, name, mesh)
        installed: nn.Module = super().install_forward(module, mesh)
        return installed


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SharedByHeads(TensorParallelLayer):
    """Sums gradients inside the backward pass, so that passes may accumulate (transformers' own style for this sums
    what has accumulated)."""

    @contextlib.contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        whole = dict(module.named_parameters(recurse=False))
        summed = {name: _SumOfGradients.apply(p, mesh.get_group()) for name, p in whole.items()}
        module._parameters.update(summed)
        try:
            yield
        finally:
            module._parameters.update(whole)


STYLES: dict[str, Any] = {
    "mdn_heads": _PartsOfHeads(),
    "mdn_columns": _ColumnsOfLast(),
    "mdn_channels": _PartsOfHeads(),
    "mdn_shared": _SharedByHeads(),
}
for _name, _style in STYLES.items():
    ALL_PARALLEL_STYLES.register(_name, _style)


def split_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep this rank's heads of a whole model, which must be the same on every rank of ``mesh`` (one dimension)."""
    if mesh.size() == 1:
        return
    check_plan(model)
    apply_tensor_parallelism(model, mesh)
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size())
    model._tp_size, model._device_mesh = mesh.size(), mesh  # type: ignore[assignment]
    model._is_distributed_loading_by_transformers = True  # transformers' Trainer leaves such a model as it is


def check_plan(model: PreTrainedModel) -> None:
    if not model.tp_plan:
        raise ValueError(
            f"tensor parallelism cannot split mixer={model.config.mixer!r}, mlp={model.config.mlp!r}: it splits the "
            f"heads of {', '.join(name for name, mixer in MIXERS.items() if mixer.tensor_plan)}, and mlp='swiglu'"
        )


def load_parts(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Whole tensors by name into a split model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part_of(weights[name], parameter))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What ``like`` holds of a whole tensor: a DTensor if it is one."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_of(x: Any) -> Any:
    """A tensor from its parts on all ranks (a collective); anything else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x

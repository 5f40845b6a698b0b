"""Moving chunks between the caller's [B, T, H, D] tensors and the head-major [Z, C, D] batches that are computed on.

One gather brings the rows of a group's chunks in and one scatter takes results out, whether the batch is dense or
packed. Padding rows are neutral: zero vectors, alpha = mu = 1, beta = eta = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdn.ops.l2norm import L2NORM_EPS
from mdn.ops.memory import empty
from mdn.ops.momentum_delta_rule.options import RuleOptions
from mdn.ops.momentum_delta_rule.schedule import Group
from mdn.ops.momentum_delta_rule.workspace import workspace_for


@dataclass
class Unit:
    """Vectors [Z, C, K] after the L2 norm, and one over the norm [Z, C, 1] (None when they are not normalised)."""

    rows: Tensor
    inverse_norm: Tensor | None


@dataclass
class Gates:
    log_alpha: Tensor  # [Z, C], as are all
    log_mu: Tensor
    beta: Tensor
    eta: Tensor


def dense_block(x: Tensor, group: Group, size: int) -> Tensor:
    """The group's rectangle of a contiguous [B, T, H, D] tensor, viewed as [rounds, sequences, H, C, D]."""
    assert group.block is not None
    length, sequences, tokens = group.block
    rectangle = x.view(-1, length, *x.shape[-2:])[sequences, tokens]
    return rectangle.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)


class ChunkReader:
    """Reads the chunks of a group, converted to the compute dtype, normalised and padded.

    What is read lives in the workspace under the given name, until the name is read again.
    """

    def __init__(self, q, k, v, p, log_alpha, log_mu, beta, eta, options: RuleOptions, dtype: torch.dtype):
        self.q, self.k, self.v, self.p = q, k, v, p
        self.gate_table = torch.stack([x.reshape(-1).to(dtype) for x in (log_alpha, log_mu, beta, eta)])
        self.options = options
        self.dtype = dtype
        self.heads = v.shape[-2]
        self.repeats = v.shape[-2] // q.shape[-2]
        self.workspace = workspace_for(q.device, dtype)

    def values(self, name: str, x: Tensor, group: Group) -> Tensor:
        """A [B, T, HV, V] tensor as [Z, C, V]."""
        return self._load(name, x, group, 1)

    def values_into(self, out: Tensor, x: Tensor, group: Group, factor: float) -> None:
        """``out`` [Z, C, V] = factor * values(x)."""
        if group.block is not None and x.is_contiguous() and x.dtype == self.dtype:
            source = dense_block(x, group, out.shape[1])
            torch.mul(source, factor, out=out.view(*source.shape))
        else:
            torch.mul(self.values("values", x, group), factor, out=out)

    def unit(self, name: str, x: Tensor, group: Group, out: Tensor | None = None) -> Unit:
        """q, k or p [B, T, H, K] as [Z, C, K], one head per value head."""
        rows = self._load(name, x, group, self.repeats)
        if not self.options.l2norm:
            return Unit(rows if out is None else out.copy_(rows), None)
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        inverse_norm = norm.square_().add_(L2NORM_EPS).rsqrt_()
        return Unit(torch.mul(rows, inverse_norm, out=rows if out is None else out), inverse_norm)

    def gates(self, group: Group) -> Gates:
        table = self.gate_table.index_select(1, group.rows(self.heads))
        if (
            group.padding is not None
        ):  # log 1 = 0 for the decays, no write for beta and eta: zero is neutral for all four
            table = torch.where(group.kept(self.heads), table, 0.0)
        return Gates(*table.view(4, -1, group.tokens.shape[1]))

    def raw_gradient(self, gradient: Tensor, along: Tensor, unit: Unit) -> Tensor:
        """Gradient of the raw vectors from that of the unit ones; ``along`` [Z, C, 1] is <gradient, unit>.

        Overwrites ``gradient``; sums over the value heads that share a key head.
        """
        if unit.inverse_norm is not None:
            gradient = gradient.addcmul_(unit.rows, along, value=-1).mul_(unit.inverse_norm)
        if self.repeats > 1:
            heads = self.heads // self.repeats
            gradient = gradient.unflatten(0, (-1, heads, self.repeats)).sum(2).flatten(0, 1)
        return gradient

    def _load(self, name: str, x: Tensor, group: Group, repeats: int) -> Tensor:
        width, size = x.shape[-1], group.tokens.shape[1]
        source, index = x.reshape(-1, width), group.rows(x.shape[-2], repeats)
        rows = self.workspace.take(name, len(index), width)
        if x.dtype == self.dtype:
            torch.index_select(source, 0, index, out=rows)
        else:
            rows.copy_(source.index_select(0, index))
        if group.padding is not None:
            rows.index_fill_(0, group.padding_places(x.shape[-2] * repeats), 0.0)
        return rows.view(-1, size, width)


class ChunkWriter:
    """Scatters [Z, C, D] results into a [B, T, H, D] tensor, leaving padding out."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @classmethod
    def like(cls, x: Tensor) -> ChunkWriter:
        return cls(empty(x.shape, x.dtype, x.device))

    def put(self, rows: Tensor, group: Group, factor: float = 1.0) -> None:
        """Write ``factor * rows``."""
        heads, width = self.tensor.shape[-2:]
        if group.block is not None and rows.dtype == self.tensor.dtype:  # several times faster than a scatter
            target = dense_block(self.tensor, group, rows.shape[1])
            torch.mul(rows.view(target.shape), factor, out=target)
            return
        rows, index = (rows if factor == 1.0 else rows * factor).reshape(-1, width), group.rows(heads)
        if group.padding is not None:
            places, index = group.kept_rows(heads)
            rows = rows.index_select(0, places)
        self.tensor.view(-1, width).index_copy_(0, index, rows.to(self.tensor.dtype))


class GradientWriters:
    """The gradients of q, k, v, p and the gates, filled group by group."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, gates: tuple[Tensor, ...], dtype: torch.dtype
    ):
        self.query, self.key, self.value = (ChunkWriter.like(x) for x in (q, k, v))
        self.probe = None if p is None else ChunkWriter.like(p)
        self.gates = ChunkWriter(v.new_empty(*gates[0].shape, 4, dtype=dtype))
        self._gate_dtypes = [gate.dtype for gate in gates]

    def results(self) -> tuple[Tensor | None, ...]:
        probe = None if self.probe is None else self.probe.tensor
        gates = [x.to(dtype, copy=True) for x, dtype in zip(self.gates.tensor.unbind(-1), self._gate_dtypes)]
        return (self.query.tensor, self.key.tensor, self.value.tensor, probe, *gates)

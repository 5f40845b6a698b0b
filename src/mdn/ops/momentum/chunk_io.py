"""Moving chunks between the caller's [B, T, H, D] tensors and the head-major [Z, C, D] batches that are computed on.

One gather brings the rows of a group's chunks in and one scatter takes results out, whether the batch is dense or
packed. Padding rows are neutral: q = k = p = 0, alpha = mu = 1, beta = eta = 0; their values then meet only zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdn.ops.l2norm import L2NORM_EPS
from mdn.ops.momentum.interface import RuleOptions
from mdn.ops.momentum.schedule import Group
from mdn.ops.momentum.workspace import workspace_for


@dataclass
class Gates:
    log_alpha: Tensor  # [Z, C], as are all
    log_mu: Tensor
    beta: Tensor
    eta: Tensor


def dense_block(x: Tensor, group: Group, size: int) -> Tensor:
    """The group's rectangle of a contiguous [B, T, H, D] tensor, viewed as [rounds, sequences, H, 1, C, D]."""
    assert group.block is not None
    length, sequences, tokens = group.block
    rectangle = x.view(-1, length, *x.shape[-2:])[sequences, tokens]
    return rectangle.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4).unsqueeze(3)


@dataclass
class InverseNorms:
    """One over the L2 norm; ones when vectors are not normalised."""

    query: Tensor  # [Z, C], as are all
    key: Tensor
    probe: Tensor


class ChunkReader:
    """Reads the chunks of a group, converted to the compute dtype and padded; q, k and p are normalised on the way.

    What is read lives in the workspace under the given name, until the name is read again.
    """

    def __init__(self, q, k, v, p, log_alpha, log_mu, beta, eta, options: RuleOptions, dtype: torch.dtype):
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.p = None if p is None else p.contiguous()
        self.options = options
        self.dtype = dtype
        self.heads = v.shape[-2]
        self.repeats = v.shape[-2] // q.shape[-2]
        self.workspace = workspace_for(q.device, dtype)
        per_token = [x.reshape(-1).to(dtype) for x in (log_alpha, log_mu, beta, eta)]
        per_token += [self._inverse_norm(x) for x in (self.q, self.k, self.k if self.p is None else self.p)]
        self._scalars = torch.stack(per_token)

    def scalars(self, group: Group) -> tuple[Gates, InverseNorms]:
        table = self._scalars.index_select(1, group.rows(self.heads))
        if group.padding is not None:
            # Zero is neutral for all of them: log 1 for the decays, no write, vectors of length zero.
            table = torch.where(group.kept(self.heads), table, 0.0)
        rows = table.view(len(table), -1, group.tokens.shape[1]).unbind()
        return Gates(*rows[:4]), InverseNorms(*rows[4:])

    def values(self, name: str, x: Tensor, group: Group, factor: float = 1.0) -> Tensor:
        """A [B, T, HV, V] tensor as [Z, C, V], times ``factor``."""
        return self.load(x, group, self.workspace.take(name, *self._shape(x, group)), factor)

    def load(self, x: Tensor, group: Group, out: Tensor, factor: Tensor | float) -> Tensor:
        """``out`` [Z, C, D] = factor * the rows of x [B, T, H, D]; ``factor`` is a number or [Z, C]."""
        repeats = self.heads // x.shape[-2]
        if group.block is not None and x.is_contiguous() and x.dtype == self.dtype:
            source = dense_block(x, group, out.shape[1])
            outer = (*source.shape[:3], repeats)
            by = factor if isinstance(factor, float) else factor.unsqueeze(-1).unflatten(0, outer)
            torch.mul(source, by, out=out.unflatten(0, outer))
            return out
        source, index = x.reshape(-1, x.shape[-1]), group.rows(x.shape[-2], repeats)
        gathered = self.workspace.take("gathered", len(index), x.shape[-1])
        if x.dtype == self.dtype:
            torch.index_select(source, 0, index, out=gathered)
        else:
            gathered.copy_(source.index_select(0, index))
        by = factor if isinstance(factor, float) else factor.unsqueeze(-1)
        return torch.mul(gathered.view(out.shape), by, out=out)

    def put_gradient(
        self, to: ChunkWriter, group: Group, gradient: Tensor, unit: Tensor, along: Tensor, inverse_norm: Tensor
    ) -> None:
        """Write the gradient of q, k or p from that of its unit vectors, which is overwritten.

        ``along`` [Z, C] is <gradient, unit>; the value heads that share a key head are added up.
        """
        if self.options.l2norm:
            gradient.addcmul_(unit, along.unsqueeze(-1), value=-1)
        if self.repeats > 1:
            shared = (-1, self.heads // self.repeats, self.repeats)
            gradient = gradient.unflatten(0, shared).sum(2).flatten(0, 1)
            inverse_norm = inverse_norm.unflatten(0, shared)[:, :, 0].flatten(0, 1)
        to.put(gradient, group, factor=inverse_norm)

    def _shape(self, x: Tensor, group: Group) -> tuple[int, int, int]:
        chunks, size = group.tokens.shape
        return chunks * self.heads, size, x.shape[-1]

    def _inverse_norm(self, x: Tensor) -> Tensor:
        """[B * T * HV]"""
        if self.options.l2norm:
            norm = torch.linalg.vector_norm(x, dim=-1, dtype=self.dtype)
            inverse = norm.square_().add_(L2NORM_EPS).rsqrt_()
        else:
            inverse = x.new_ones(x.shape[:-1], dtype=self.dtype)
        return inverse.repeat_interleave(self.repeats, dim=-1).view(-1) if self.repeats > 1 else inverse.view(-1)


class ChunkWriter:
    """Scatters [Z, C, D] results into a [B, T, H, D] tensor, leaving padding out."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @classmethod
    def like(cls, x: Tensor) -> ChunkWriter:
        return cls(torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def put(self, rows: Tensor, group: Group, factor: Tensor | float = 1.0) -> None:
        """Write ``factor * rows``; ``factor`` is a number or [Z, C]. May overwrite the rows."""
        heads, width = self.tensor.shape[-2:]
        by = factor if isinstance(factor, float) else factor.unsqueeze(-1)
        if group.block is not None and rows.dtype == self.tensor.dtype:  # several times faster than a scatter
            target = dense_block(self.tensor, group, rows.shape[1])
            by = by if isinstance(by, float) else by.view(*target.shape[:-1], 1)
            torch.mul(rows.view(target.shape), by, out=target)
            return
        if not isinstance(by, float) or by != 1.0:
            rows.mul_(by)
        rows, index = rows.reshape(-1, width), group.rows(heads)
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

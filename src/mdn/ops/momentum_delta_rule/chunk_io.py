"""Moving chunks between the caller's [B, T, H, D] tensors and the head-major [Z, C, D] batches that are computed on.

One gather brings the rows of a group's chunks in and one scatter takes results out, whether the batch is dense or packed.
Padding rows are neutral: zero vectors, alpha = mu = 1, beta = eta = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.ops.l2norm import L2NORM_EPS
from mdn.ops.momentum_delta_rule.options import RuleOptions
from mdn.ops.momentum_delta_rule.schedule import Group


def row_index(tokens: Tensor, heads: int, repeats: int) -> Tensor:
    """int64 [chunks, heads * repeats, C]: rows of a [B * T * heads, D] tensor, each head taken ``repeats`` times."""
    head = torch.arange(heads, device=tokens.device).repeat_interleave(repeats)
    return tokens.unsqueeze(1) * heads + head.unsqueeze(-1)


class ChunkReader:
    """Reads the chunks of a group, converted, normalised and padded."""

    def __init__(self, q, k, v, p, log_alpha, log_mu, beta, eta, options: RuleOptions, dtype: torch.dtype):
        self.vectors = {"q": q, "k": k, "p": p}
        self.v = v
        self._gates = (log_alpha, log_mu, beta, eta)
        self.options = options
        self.dtype = dtype
        self.heads = v.shape[-2]
        self.repeats = v.shape[-2] // q.shape[-2]
        self._norms: dict[str, Tensor] = {}

    def values(self, x: Tensor, group: Group) -> Tensor:
        """A [B, T, HV, V] tensor as [Z, C, V]."""
        return self._rows(x, group, 1)

    def keys(self, group: Group) -> tuple[Tensor, Tensor]:
        """k [Z, C, K], and p above q [Z, 2C, K]."""
        key = self._normalised("k", group)
        probe = key if self.vectors["p"] is None else self._normalised("p", group)
        return key, torch.cat([probe, self._normalised("q", group)], dim=1)

    def only_keys(self, group: Group) -> Tensor:
        return self._normalised("k", group)

    def gates(self, group: Group) -> list[Tensor]:
        """log_alpha, log_mu, beta, eta as [Z, C]."""
        index = row_index(group.tokens, self.heads, 1)
        loaded = [x.reshape(-1).index_select(0, index.reshape(-1)).to(self.dtype).view(index.shape) for x in self._gates]
        if group.padding is not None:
            for x in loaded:  # log 1 = 0 for the decays, no write for beta and eta: zero is neutral for all four
                x.masked_fill_(group.padding.unsqueeze(1), 0.0)
        return [x.flatten(0, 1) for x in loaded]

    def through_norm(self, name: str, gradient: Tensor, normalised: Tensor, group: Group) -> Tensor:
        """Gradient of the raw vector from that of the normalised one, summed over the value heads that share it."""
        if self.options.l2norm:
            along = (gradient * normalised).sum(-1, keepdim=True)
            gradient = (gradient - normalised * along) * self._norms[name]
        if self.repeats > 1:
            heads = self.heads // self.repeats
            gradient = gradient.unflatten(0, (-1, heads, self.repeats)).sum(2).flatten(0, 1)
        return gradient

    def _normalised(self, name: str, group: Group) -> Tensor:
        rows = self._rows(self.vectors[name], group, self.repeats)
        if self.options.l2norm:
            # one over the norm is kept for the backward pass of the same group
            self._norms[name] = torch.rsqrt(torch.linalg.vecdot(rows, rows) + L2NORM_EPS).unsqueeze(-1)
            rows = rows.mul_(self._norms[name])
        return rows

    def _rows(self, x: Tensor, group: Group, repeats: int) -> Tensor:
        index = row_index(group.tokens, x.shape[-2], repeats)
        rows = x.reshape(-1, x.shape[-1]).index_select(0, index.reshape(-1)).to(self.dtype)
        rows = rows.view(*index.shape, x.shape[-1])
        if group.padding is not None:
            rows.masked_fill_(group.padding[:, None, :, None], 0.0)
        return rows.flatten(0, 1)


class ChunkWriter:
    """Scatters [Z, C, D] results into a [B, T, H, D] tensor (or [Z, C] into [B, T, H]), leaving padding out."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @classmethod
    def like(cls, x: Tensor) -> ChunkWriter:
        return cls(torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def put(self, rows: Tensor, group: Group) -> None:
        heads, width = self.tensor.shape[-2:]
        self._put(rows.reshape(-1, width), self.tensor.view(-1, width), heads, group)

    def put_gate(self, values: Tensor, group: Group) -> None:
        self._put(values.reshape(-1), self.tensor.view(-1), self.tensor.shape[-1], group)

    def _put(self, rows: Tensor, target: Tensor, heads: int, group: Group) -> None:
        index = row_index(group.tokens, heads, 1)
        if group.padding is not None:
            kept = ~group.padding.unsqueeze(1).expand_as(index).reshape(-1)
            rows, index = rows[kept], index.reshape(-1)[kept]
        target.index_copy_(0, index.reshape(-1), rows.to(target.dtype))

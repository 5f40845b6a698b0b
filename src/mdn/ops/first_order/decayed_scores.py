"""Products of two vectors with a separate decay for every dimension between them.

    scores[m, n, i, j] = sum_d left[m, i, d] right[n, j, d] exp(g[j+1, d] + ... + g[i, d])     for i >= j, else 0

The decay cannot be taken out of the sum, and splitting it as exp(G_i) exp(-G_j) overflows. Instead blocks of 1, 2, 4,
... tokens are merged in pairs: between the earlier block and the later one, the boundary is the anchor. The later
vectors decay from the anchor on, the earlier ones up to it. Both are sums of given logarithms, never differences:
every exponent is <= 0, and a gate of -inf gives an exact zero. Only left, right and g are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _DecayedScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, g)
        lefts, rights, size = left.shape[-3], right.shape[-3], g.shape[-2]
        scores = left.new_zeros(*g.shape[:-2], lefts, rights, size, size)
        same = left.unsqueeze(-3) * right.unsqueeze(-4)
        scores.diagonal(dim1=-2, dim2=-1).copy_(same.sum(-1))
        for block, to_anchor, from_anchor in _levels(g):
            late = _later(left, block) * from_anchor.unsqueeze(-4)
            early = _earlier(right, block) * to_anchor.unsqueeze(-4)
            products = torch.einsum("...mpid,...npjd->...mnpij", late, early)
            _later_rows_earlier_columns(scores, block).copy_(products)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right, g = ctx.saved_tensors
        on_diagonal = grad.diagonal(dim1=-2, dim2=-1)
        grad_left = torch.einsum("...mni,...nid->...mid", on_diagonal, right)
        grad_right = torch.einsum("...mni,...mid->...nid", on_diagonal, left)
        grad_g = torch.zeros_like(g)
        for block, to_anchor, from_anchor in _levels(g):
            grad_products = _later_rows_earlier_columns(grad, block)
            late = _later(left, block) * from_anchor.unsqueeze(-4)
            early = _earlier(right, block) * to_anchor.unsqueeze(-4)
            grad_late = torch.einsum("...mnpij,...npjd->...mpid", grad_products, early)
            grad_early = torch.einsum("...mnpij,...mpid->...npjd", grad_products, late)
            _later(grad_left, block).add_(grad_late * from_anchor.unsqueeze(-4))
            _earlier(grad_right, block).add_(grad_early * to_anchor.unsqueeze(-4))
            # Token l of the later block decays every row i >= l; token l of the earlier one every column j < l.
            along_rows = (grad_late * late).sum(-4).flip(-2).cumsum(-2).flip(-2)
            along_columns = (grad_early * early).sum(-4).cumsum(-2)[..., :-1, :]
            pairs = grad_g.unflatten(-2, (-1, 2, block))
            pairs[..., 1, :, :].add_(along_rows)
            pairs[..., 0, 1:, :].add_(along_columns)
        return grad_left, grad_right, grad_g


def decayed_scores(left: Tensor, right: Tensor, g: Tensor) -> Tensor:
    """left `[..., M, C, K]`, right `[..., N, C, K]`, g `[..., C, K]` -> `[..., M, N, C, C]`; C is a power of two."""
    return _DecayedScores.apply(left, right, g)


def _levels(g: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every block size: decays of the earlier blocks up to the anchor, and of the later ones from it on.

    Both are `[..., pairs, block, K]`.
    """
    block = 1
    up_to, after = g, torch.zeros_like(g)  # sums over the token's block: up to the token, and after it
    while block < g.shape[-2]:
        prefix, suffix = up_to.unflatten(-2, (-1, 2, block)), after.unflatten(-2, (-1, 2, block))
        yield block, suffix[..., 0, :, :].exp(), prefix[..., 1, :, :].exp()
        totals = prefix[..., -1:, :]
        up_to = torch.stack([prefix[..., 0, :, :], prefix[..., 1, :, :] + totals[..., 0, :, :]], -3).reshape(g.shape)
        after = torch.stack([suffix[..., 0, :, :] + totals[..., 1, :, :], suffix[..., 1, :, :]], -3).reshape(g.shape)
        block *= 2


def _earlier(x: Tensor, block: int) -> Tensor:
    """`[..., C, K]` to the earlier blocks of all pairs `[..., pairs, block, K]`, as a view."""
    return x.unflatten(-2, (-1, 2, block))[..., 0, :, :]


def _later(x: Tensor, block: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, block))[..., 1, :, :]


def _later_rows_earlier_columns(scores: Tensor, block: int) -> Tensor:
    """The parts `[..., pairs, block, block]` of `[..., C, C]` where a pair's later rows meet its earlier columns."""
    grid = scores.unflatten(-1, (-1, 2, block)).unflatten(-4, (-1, 2, block))
    return grid[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

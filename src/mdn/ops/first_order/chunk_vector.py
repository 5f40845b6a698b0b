"""First-order rules whose state decays by its own number in every key dimension, chunk by chunk.

    r_t = v_t - S_{t-1}^T p_t                                   no p: r_t = v_t
    S_t = diag(alpha_t) S_{t-1} + beta_t k_t r_t^T              o_t = S_t^T q_t

Without p this is GLA, with p = alpha k KDA. RWKV-7 writes probed_t = S_{t-1}^T p_t along a key e of its own:
S_t = diag(alpha_t) S_{t-1} + k_t v_t^T + e_t probed_t^T. Equations of docs/derivation.md, section 11; here k stands for
beta k, and ``decayed_products`` computes ``[Q K]`` and its like:

    KDA       (I + [P K]) R      = V - Pbar S0              written = R                                          (33)
    RWKV-7    (I - [P E]) probed = [P K] V + Pbar S0        written = V
    GLA                                                     written = V

    O  = Qbar S0 + [Q K] written + [Q E] probed             the terms with E: RWKV-7 only                        (34)
    S' = diag(abar_C) S0 + Kbar^T written + Ebar^T probed

Qbar and Pbar are decayed from the chunk's start (Pbar to the token before), Kbar and Ebar up to its end. Every exponent
is <= 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import chunk_scan
from mdn.ops.first_order.chunk_scalar import one_row_down
from mdn.ops.first_order.first_derivative import first_derivative_only
from mdn.ops.first_order.inputs import PreparedTensors
from mdn.ops.first_order.products import matmul, solve_unit_lower
from mdn.ops.first_order.state_scan import state_scan
from mdn.ops.pairwise import Pairs, in_pairs, levels
from mdn.ops.shared_checks import without_autocast


def chunk_vector_decay(
    x: PreparedTensors,
    initial_state: Tensor,
    boundaries: SequenceBoundaries | None,
    chunk_size: int,
    outputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, HV, V]`` (if needed) and final states ``[N, HV, K, V]``, in the dtype of the computation."""
    scan = chunk_scan(x.v, boundaries, chunk_size)
    S0 = scan.rank_states(initial_state)
    with without_autocast(x.v):
        q, k, v, log_alpha = (scan.split(y) for y in (x.q, x.k, x.v, x.log_alpha))
        if x.beta is not None:
            k = scan.split(x.beta).unsqueeze(-1) * k
        p, e = (None if y is None else scan.split(y) for y in (x.p, x.erase_key))
        abar, to_end = chunk_decays(log_alpha)
        whole = abar[..., -1, :].unsqueeze(-1)  # [..., K, 1]
        late = [q] if outputs else []
        if p is not None:
            # p_t probes the state before token t decays it, so its decays end at t - 1.
            late.append(F.pad(p[..., 1:, :], (0, 0, 0, 1)))
        early = [k] if e is None else [k, e]
        # Of q (if outputs are needed), then of p, each [..., N, C, C] with k and then with e.
        products = _unstacked(decayed_products(_stacked(late), _stacked(early), log_alpha), -4) if late else ()
        written, probed = v, None
        if p is None:
            starts, _, final = state_scan(whole, S0, scan.rounds, added=matmul((k * to_end).mT, v))
        else:
            probes = p * one_row_down(abar, first=1.0)
            pk, *pe = _unstacked(one_row_down(products[-1]), -3)
            if e is None:
                values, probes = solve_unit_lower(pk, v, probes)  # (33): KDA
                starts, written, final = state_scan(whole, S0, scan.rounds, values, probes, k * to_end)
            else:
                values, probes = solve_unit_lower(-pe[0], matmul(pk, v), -probes)  # (33): RWKV-7
                added = matmul((k * to_end).mT, v)
                starts, probed, final = state_scan(whole, S0, scan.rounds, values, probes, e * to_end, added)
        if not outputs:
            return v.new_empty(0), scan.unrank_states(final)
        qk, *qe = _unstacked(products[0], -3)
        o = matmul(q * abar, starts) + matmul(qk, written)  # (34)
        if probed is not None:
            o = o + matmul(qe[0], probed)
    return scan.join(o), scan.unrank_states(final)


def _stacked(rows: list[Tensor]) -> Tensor:
    """``[..., M, C, K]``; a view if there is only one."""
    return torch.stack(rows, -3) if len(rows) > 1 else rows[0].unsqueeze(-3)


def _unstacked(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Its parts along ``dim``. The gradient of a squeeze is a view, that of unbinding is a copy."""
    return (x.squeeze(dim),) if x.shape[dim] == 1 else x.unbind(dim)


def chunk_decays(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., C, K]``: decays from the chunk's start through each token, and from after each token to its end."""
    following = F.pad(log_alpha[..., 1:, :], (0, 0, 0, 1))
    return log_alpha.cumsum(-2).exp(), following.flip(-2).cumsum(-2).flip(-2).exp()


# -------------------------------------------------------------------------- products with a decay per key dimension
#
#     products[m, n, i, j] = sum_d late[m, i, d] early[n, j, d] exp(g[j+1, d] + ... + g[i, d])     for i >= j, else 0
#
# Runs of 1, 2, 4, ... tokens are merged in pairs (``mdn.ops.pairwise``). The decays up to an anchor and from it on are
# sums of given logarithms, never differences.


class Merge(NamedTuple):
    """One level of pairwise merging."""

    pairs: Pairs
    to_anchor: Tensor
    """[..., pairs, block, K]: decay of each token of the earlier runs up to the anchor"""
    from_anchor: Tensor
    """[..., pairs, block, K]: decay of each token of the later runs from the anchor on"""


def pairwise_merges(g: Tensor) -> Iterator[Merge]:
    """The levels for logarithms ``g [..., C, K]``. Every exponent is <= 0, and a gate of ``-inf`` gives an exact
    zero."""
    up_to, after = g, torch.zeros_like(g)  # sums over the token's run: up to the token, and after it
    for pairs in levels(g.shape[-2]):
        prefix, suffix = in_pairs(up_to, -2, pairs.block), in_pairs(after, -2, pairs.block)
        yield Merge(pairs, suffix[..., 0, :, :].exp(), prefix[..., 1, :, :].exp())
        totals = prefix[..., -1:, :]
        up_to = torch.stack([prefix[..., 0, :, :], prefix[..., 1, :, :] + totals[..., 0, :, :]], -3).reshape(g.shape)
        after = torch.stack([suffix[..., 0, :, :] + totals[..., 1, :, :], suffix[..., 1, :, :]], -3).reshape(g.shape)


def decayed_products(late: Tensor, early: Tensor, g: Tensor) -> Tensor:
    """late ``[..., M, C, K]``, early ``[..., N, C, K]``, g ``[..., C, K]`` -> ``[..., M, N, C, C]``, lower triangular.

    C is a power of two. Only the three arguments are kept for the backward pass.
    """
    multiply: Any = _DecayedProducts.apply
    products: Tensor = multiply(late, early, g)
    return products


class _DecayedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, late: Tensor, early: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(late, early, g)
        size = g.shape[-2]
        products = late.new_zeros(*g.shape[:-2], late.shape[-3], early.shape[-3], size, size)
        same = late.unsqueeze(-3) * early.unsqueeze(-4)
        products.diagonal(dim1=-2, dim2=-1).copy_(same.sum(-1))
        for merge in pairwise_merges(g):
            rows = merge.pairs.later(late) * merge.from_anchor.unsqueeze(-4)
            columns = merge.pairs.earlier(early) * merge.to_anchor.unsqueeze(-4)
            merge.pairs.between(products).copy_(torch.einsum("...mpid,...npjd->...mnpij", rows, columns))
        return products

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        late, early, g = saved
        on_diagonal = grad.diagonal(dim1=-2, dim2=-1)
        grad_late = torch.einsum("...mni,...nid->...mid", on_diagonal, early)
        grad_early = torch.einsum("...mni,...mid->...nid", on_diagonal, late)
        grad_g = torch.zeros_like(g)
        for merge in pairwise_merges(g):
            grad_between = merge.pairs.between(grad)
            rows = merge.pairs.later(late) * merge.from_anchor.unsqueeze(-4)
            columns = merge.pairs.earlier(early) * merge.to_anchor.unsqueeze(-4)
            grad_rows = torch.einsum("...mnpij,...npjd->...mpid", grad_between, columns)
            grad_columns = torch.einsum("...mnpij,...mpid->...npjd", grad_between, rows)
            merge.pairs.later(grad_late).add_(grad_rows * merge.from_anchor.unsqueeze(-4))  # (37)
            merge.pairs.earlier(grad_early).add_(grad_columns * merge.to_anchor.unsqueeze(-4))
            # (38) on one level: token l of the later run decays every row i >= l, token l of the earlier one every
            # column j < l.
            along_rows = (grad_rows * rows).sum(-4).flip(-2).cumsum(-2).flip(-2)
            along_columns = (grad_columns * columns).sum(-4).cumsum(-2)[..., :-1, :]
            merge.pairs.later(grad_g).add_(along_rows)
            merge.pairs.earlier(grad_g)[..., 1:, :].add_(along_columns)
        return grad_late, grad_early, grad_g

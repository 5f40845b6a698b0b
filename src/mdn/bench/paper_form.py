"""The paper's chunkwise form with its log-domain coefficients, differentiated automatically.

Kept for comparison only (speed, and where its arithmetic ends): it divides by cumulative products, so it loses all
digits once mu falls faster than alpha. Use ``mdn.ops.chunk_momentum_delta_rule`` for everything else.
Shapes as there; float32; no packing. As in the paper's code, eta is folded into k, so ``gamma`` here is the library's
``gamma_S`` without eta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.l2norm import l2norm


class PaperCoefficients(NamedTuple):
    log_abar: Tensor  # [..., C]
    log_mbar: Tensor  # [..., C]
    b: Tensor  # [..., C]
    gamma: Tensor  # [..., C, C]


class PaperOutput(NamedTuple):
    o: Tensor  # [B, T, H, V]
    final_state: Tensor  # [2, B, H, K, V]: S, then M


def log_domain_coefficients(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> PaperCoefficients:
    """As the paper computes them, from gates ``[..., C]``."""
    log_abar, log_mbar = log_alpha.cumsum(-1), log_mu.cumsum(-1)
    log_c = torch.logcumsumexp((beta + 1e-6).log() + log_mbar - log_abar, dim=-1)
    log_c_before = F.pad(log_c[..., :-1], (1, 0), value=-math.inf)
    share = 1 - (log_c_before.unsqueeze(-2) - log_c.unsqueeze(-1)).tril().exp()
    gamma = ((log_abar + log_c).unsqueeze(-1) - log_mbar.unsqueeze(-2)).exp().tril() * share
    return PaperCoefficients(log_abar, log_mbar, (log_abar + log_c).exp(), gamma)


def masked_coefficients(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> PaperCoefficients:
    """The same values, with a gradient that only the used entries can spoil.

    Entries above the diagonal are masked before the exponential. If masked after it, their overflow alone makes the
    gradient NaN (0 times infinity), in most runs at the first step.
    """
    log_abar, log_mbar = log_alpha.cumsum(-1), log_mu.cumsum(-1)
    log_c = torch.logcumsumexp((beta + 1e-6).log() + log_mbar - log_abar, dim=-1)
    log_c_before = F.pad(log_c[..., :-1], (1, 0), value=-math.inf)
    above = torch.ones(log_c.shape[-1], log_c.shape[-1], dtype=torch.bool, device=log_c.device).triu(1)
    share = 1 - (log_c_before.unsqueeze(-2) - log_c.unsqueeze(-1)).masked_fill(above, 0.0).exp()
    exponent = (log_abar + log_c).unsqueeze(-1) - log_mbar.unsqueeze(-2)
    gamma = exponent.masked_fill(above, -math.inf).exp() * share
    return PaperCoefficients(log_abar, log_mbar, (log_abar + log_c).exp(), gamma)


def paper_chunk_momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    *,
    scale: float | None = None,
    library_solve: bool = False,
    coefficients: Callable[[Tensor, Tensor, Tensor], PaperCoefficients] = log_domain_coefficients,
) -> PaperOutput:
    """From q, k ``[B, T, H, K]`` (L2-normalised here), v ``[B, T, H, V]`` and gates ``[B, T, H]``, in chunks of 64.

    The paper's code inverts the triangular system row by row; ``library_solve`` uses LAPACK, a stronger peer.
    """
    time, chunk_size = q.shape[1], 64
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = l2norm(q) * scale, l2norm(k)
    p = k * log_alpha.exp().unsqueeze(-1)
    padding = -time % chunk_size
    # A padded token with alpha = mu = 1 and beta = eta = 0 changes no state.
    vectors = (_chunked(F.pad(x, (0, 0, 0, 0, 0, padding)), chunk_size) for x in (q, k * eta.unsqueeze(-1), v, p))
    q, k, v, p = vectors
    gates = (F.pad(x, (0, 0, 0, padding)).unsqueeze(-1) for x in (log_alpha, log_mu, beta))
    log_abar, log_mbar, b, gamma = coefficients(*(_chunked(x, chunk_size).squeeze(-1) for x in gates))

    abar = log_abar.exp()
    system = (p @ k.mT) * _shifted(gamma, 0.0)
    inverse = inverse_by_library(system) if library_solve else inverse_by_rows(system)
    # residual = u - y S0 + z M0 for the states S0, M0 at the chunk's start
    u = inverse @ v
    y = inverse @ (_shifted(abar, 1.0).unsqueeze(-1) * p)
    z = inverse @ (_shifted(b, 0.0).unsqueeze(-1) * p)
    attend = (q @ k.mT) * gamma
    write_M = (log_mbar[..., -1:] - log_mbar).exp().unsqueeze(-1) * k
    write_S = gamma[..., -1, :].unsqueeze(-1) * k

    S = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    M = torch.zeros_like(S)
    outputs = []
    for i in range(q.shape[2]):
        residual = u[:, :, i] - y[:, :, i] @ S + z[:, :, i] @ M
        read = (abar[:, :, i].unsqueeze(-1) * q[:, :, i]) @ S - (b[:, :, i].unsqueeze(-1) * q[:, :, i]) @ M
        outputs.append(read + attend[:, :, i] @ residual)
        end = (slice(None), slice(None), i, slice(-1, None), None)
        S = abar[end] * S - b[end] * M + write_S[:, :, i].mT @ residual
        M = log_mbar[end].exp() * M - write_M[:, :, i].mT @ residual
    return PaperOutput(torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)[:, :time], torch.stack([S, M]))


def inverse_by_rows(system: Tensor) -> Tensor:
    """(I + system)^-1 by forward substitution, one row after another, as the paper's appendix has it."""
    inverse = -system
    for i in range(1, system.shape[-1]):
        row = inverse[..., i, :, None].clone() * inverse[..., :, :i].clone()
        inverse[..., i, :i] = inverse[..., i, :i].clone() + row.sum(-2)
    return inverse + torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)


def inverse_by_library(system: Tensor) -> Tensor:
    identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    return torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)


def _shifted(x: Tensor, first: float) -> Tensor:
    """The row before each, in chunks ``[B, H, N, C, ...]``; ``first`` before the first."""
    return torch.cat([torch.full_like(x[:, :, :, :1], first), x[:, :, :, :-1]], dim=3)


def _chunked(x: Tensor, size: int) -> Tensor:
    """[B, T, H, D] to [B, H, N, C, D]."""
    return x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)

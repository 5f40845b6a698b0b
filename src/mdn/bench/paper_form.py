"""The paper's chunkwise form with its log-domain coefficients, differentiated by autograd.

Kept for comparison only (speed, and where its arithmetic ends): it divides by cumulative products, so it loses all
digits once mu falls faster than alpha. Use ``mdn.ops.chunk_momentum_delta_rule`` for everything else.
Shapes as there; float32; no packing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.l2norm import l2norm


def log_domain_coefficients(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log abar, log mbar [..., C], b [..., C] and Gamma [..., C, C] as the paper computes them."""
    log_abar, log_mbar = log_alpha.cumsum(-1), log_mu.cumsum(-1)
    log_c = torch.logcumsumexp((beta + 1e-6).log() + log_mbar - log_abar, dim=-1)
    log_c_before = torch.cat([torch.full_like(log_c[..., :1], float("-inf")), log_c[..., :-1]], dim=-1)
    share = 1 - (log_c_before.unsqueeze(-2) - log_c.unsqueeze(-1)).tril().exp()
    gamma = ((log_abar + log_c).unsqueeze(-1) - log_mbar.unsqueeze(-2)).exp().tril() * share
    return log_abar, log_mbar, (log_abar + log_c).exp(), gamma


def paper_chunk_momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    chunk_size: int = 64,
    library_solve: bool = False,
) -> Tensor:
    """o [B, T, H, V] from q, k [B, T, H, K] (L2-normalised here), v [B, T, H, V] and gates [B, T, H].

    The paper's code inverts the triangular system row by row; ``library_solve`` uses LAPACK, a stronger peer.
    """
    time, scale = q.shape[1], q.shape[-1] ** -0.5
    q, k = l2norm(q) * scale, l2norm(k)
    p = k * log_alpha.exp().unsqueeze(-1)
    padding = -time % chunk_size
    vectors = (_chunked(F.pad(x, (0, 0, 0, 0, 0, padding)), chunk_size) for x in (q, k * eta.unsqueeze(-1), v, p))
    q, k, v, p = vectors
    gates = (F.pad(x, (0, 0, 0, padding)).unsqueeze(-1) for x in (log_alpha, log_mu, beta))
    log_alpha, log_mu, beta = (_chunked(x, chunk_size).squeeze(-1) for x in gates)

    log_abar, log_mbar, b, gamma = log_domain_coefficients(log_alpha, log_mu, beta)
    abar = log_abar.exp()
    before = lambda x, first: torch.cat([torch.full_like(x[:, :, :, :1], first), x[:, :, :, :-1]], dim=3)  # noqa: E731
    system = (p @ k.mT) * before(gamma, 0.0)
    inverse = inverse_by_library(system) if library_solve else inverse_by_rows(system)
    u = inverse @ v
    y = inverse @ (before(abar, 1.0).unsqueeze(-1) * p)
    z = inverse @ (before(b, 0.0).unsqueeze(-1) * p)
    attend = (q @ k.mT) * gamma
    to_momentum = (log_mbar[..., -1:] - log_mbar).exp().unsqueeze(-1) * k
    to_fast_weight = gamma[..., -1, :].unsqueeze(-1) * k

    fast_weight = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    momentum = torch.zeros_like(fast_weight)
    outputs = []
    for i in range(q.shape[2]):
        errors = u[:, :, i] - y[:, :, i] @ fast_weight + z[:, :, i] @ momentum
        read = (abar[:, :, i].unsqueeze(-1) * q[:, :, i]) @ fast_weight - (
            b[:, :, i].unsqueeze(-1) * q[:, :, i]
        ) @ momentum
        outputs.append(read + attend[:, :, i] @ errors)
        end = (slice(None), slice(None), i, slice(-1, None), None)
        fast_weight = abar[end] * fast_weight - b[end] * momentum + to_fast_weight[:, :, i].mT @ errors
        momentum = log_mbar[end].exp() * momentum - to_momentum[:, :, i].mT @ errors
    return torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)[:, :time]


def inverse_by_rows(system: Tensor) -> Tensor:
    """(I + system)^-1 by forward substitution, one row after another, as the paper's appendix has it."""
    inverse = -system
    for i in range(1, system.shape[-1]):
        row = inverse[..., i, :, None].clone() * inverse[..., :, :i].clone()
        inverse[..., i, :i] = inverse[..., i, :i].clone() + row.sum(-2)
    return inverse + torch.eye(system.shape[-1], dtype=system.dtype)


def inverse_by_library(system: Tensor) -> Tensor:
    identity = torch.eye(system.shape[-1], dtype=system.dtype).expand_as(system)
    return torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)


def _chunked(x: Tensor, size: int) -> Tensor:
    """[B, T, H, D] to [B, H, N, C, D]."""
    return x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)

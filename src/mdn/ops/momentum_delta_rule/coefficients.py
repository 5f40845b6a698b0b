"""The coefficients of the exact chunkwise form, from the gates of a chunk, and their adjoint.

Rows and columns are numbered 0..C: index 0 is the chunk's start, index i the state after its i-th token. With that
extra row and column there are no special cases: column 0 holds abar, mbar and b, and row i - 1 is the "previous"
version of row i.

    decay_alpha[i, j] = prod_{l=j+1..i} alpha_l        [Z, C+1, C+1], ones on the diagonal, zero above
    decay_mu[i, j]    the same for mu
    gamma = decay_alpha @ diag(0, beta) @ decay_mu     [Z, C+1, C+1]: what a write at j contributes to S after token i

Each decay is the exponential of a sum of logs over its own segment (a masked cumulative sum), never a difference of two
cumulative sums: a gate of -inf gives exact zeros, a tiny gate does not spoil its neighbours, every exponent is <= 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_decay(log_gate: Tensor) -> Tensor:
    """``[Z, C]`` log gates to ``[Z, C+1, C+1]`` products over segments (stored transposed: sums run along memory)."""
    padded = F.pad(log_gate, (1, 0))
    in_segment = padded.unsqueeze(-2).expand(-1, padded.shape[1], -1).triu(1)  # row j holds log gate l for every l > j
    return in_segment.cumsum_(-1).exp_().triu().mT


def segment_decay_adjoint(grad_decay: Tensor, decay: Tensor) -> Tensor:
    """Gradient of the log gates: log gate l is in every segment that begins before l and ends at l or later."""
    begins_before = (grad_decay * decay).cumsum(-1)[:, 1:, :-1]  # row i, column l, both from 1: sum over j < l
    return begins_before.tril().sum(-2)


def momentum_coefficients(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """decay_alpha, decay_mu and gamma, each ``[Z, C+1, C+1]``, from gates ``[Z, C]``."""
    decay_alpha, decay_mu = segment_decay(log_alpha), segment_decay(log_mu)
    return decay_alpha, decay_mu, torch.bmm(decay_alpha, _no_write_at_start(beta) * decay_mu)


def momentum_coefficients_adjoint(
    grad_abar: Tensor, grad_mu_end: Tensor, grad_gamma: Tensor, decay_alpha: Tensor, decay_mu: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_alpha, log_mu and beta ``[Z, C]``.

    Besides gamma, the chunk form reads only column 0 of decay_alpha and the last row of decay_mu: ``grad_abar`` and
    ``grad_mu_end``, ``[Z, C+1]``.
    """
    beta = _no_write_at_start(beta)
    into_scaled_mu = torch.bmm(decay_alpha.mT, grad_gamma)
    grad_beta = (into_scaled_mu * decay_mu).sum(-1)[:, 1:]
    grad_decay_alpha = torch.bmm(grad_gamma, (beta * decay_mu).mT)
    grad_decay_alpha[:, :, 0] += grad_abar
    grad_decay_mu = into_scaled_mu.mul_(beta)
    grad_decay_mu[:, -1] += grad_mu_end
    return (
        segment_decay_adjoint(grad_decay_alpha, decay_alpha),
        segment_decay_adjoint(grad_decay_mu, decay_mu),
        grad_beta,
    )


def _no_write_at_start(beta: Tensor) -> Tensor:
    """``[Z, C]`` to ``[Z, C+1, 1]``: nothing is written at index 0."""
    return F.pad(beta, (1, 0)).unsqueeze(-1)

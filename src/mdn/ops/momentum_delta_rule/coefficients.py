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
from torch import Tensor


def segment_decay(log_gate: Tensor) -> Tensor:
    """``[Z, C]`` log gates to ``[Z, C+1, C+1]`` products over segments."""
    padded = torch.cat([torch.zeros_like(log_gate[:, :1]), log_gate], dim=1)
    in_segment = padded.unsqueeze(-1).expand(-1, -1, padded.shape[1]).tril(-1)  # row l holds log gate l for every j < l
    return in_segment.cumsum_(-2).exp_().tril()


def segment_decay_adjoint(grad_decay: Tensor, decay: Tensor) -> Tensor:
    """Gradient of the log gates: log gate l is in every segment that begins before l and ends at l or later."""
    weighted = grad_decay * decay
    ends_at_or_after = weighted.flip(-2).cumsum(-2).flip(-2)
    return ends_at_or_after.tril_(-1).sum(-1)[:, 1:]


def momentum_coefficients(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """decay_alpha, decay_mu and gamma, each ``[Z, C+1, C+1]``, from gates ``[Z, C]``."""
    decay_alpha, decay_mu = segment_decay(log_alpha), segment_decay(log_mu)
    gamma = torch.bmm(decay_alpha[:, :, 1:], beta.unsqueeze(-1) * decay_mu[:, 1:])
    return decay_alpha, decay_mu, gamma


def momentum_coefficients_adjoint(
    grad_decay_alpha: Tensor,
    grad_decay_mu: Tensor,
    grad_gamma: Tensor,
    decay_alpha: Tensor,
    decay_mu: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_alpha, log_mu and beta ``[Z, C]``. The first two arguments are overwritten."""
    into_scaled_mu = torch.bmm(decay_alpha[:, :, 1:].mT, grad_gamma)
    grad_beta = (into_scaled_mu * decay_mu[:, 1:]).sum(-1)
    grad_decay_mu[:, 1:] += beta.unsqueeze(-1) * into_scaled_mu
    grad_decay_alpha[:, :, 1:] += torch.bmm(grad_gamma, (beta.unsqueeze(-1) * decay_mu[:, 1:]).mT)
    return (
        segment_decay_adjoint(grad_decay_alpha, decay_alpha),
        segment_decay_adjoint(grad_decay_mu, decay_mu),
        grad_beta,
    )

"""The coefficients of the exact chunkwise form, from the gates of a chunk, and their adjoint.

Rows and columns are numbered 0..C: index 0 is the chunk's start, index i the state after its i-th token. With that
extra row and column there are no special cases: column 0 holds abar, mbar and b, and row i - 1 is the "previous"
version of row i.

    decay_alpha[i, j] = prod_{l=j+1..i} alpha_l        [Z, C+1, C+1], ones on the diagonal, zero above
    written[i, j]     = eta_j prod_{l=j+1..i} mu_l     what a write at j is worth in M after token i; eta_0 = 1
    gamma = decay_alpha @ diag(0, beta) @ written      what it is worth in S

Each decay is the exponential of a sum of logs over its own segment (a masked cumulative sum), never a difference of two
cumulative sums: a gate of -inf gives exact zeros, a tiny gate does not spoil its neighbours, every exponent is <= 0.
All but gamma are stored transposed, so that the sums run along memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Take = Callable[..., Tensor]  # (name, *shape) -> memory
LOG2_E = math.log2(math.e)  # powers of two: torch's exp is 30 times slower where it underflows
LOG_OF_ZERO = -1e4  # its exponential is exactly 0, and unlike -inf it may be multiplied by zero


@dataclass
class Coefficients:
    decay_alpha: Tensor  # [Z, C+1, C+1], as are all
    decay_mu: Tensor
    written: Tensor
    scaled: Tensor  # diag(0, beta) @ written
    gamma: Tensor


def segment_decay(log_gate: Tensor, out: Tensor | None = None) -> Tensor:
    """``[..., C]`` log gates to ``[..., C+1, C+1]`` products over segments; ``out`` is memory of that shape."""
    ones = log_gate.new_ones(log_gate.shape[-1] + 1, log_gate.shape[-1] + 1)
    padded = F.pad(log_gate.clamp(min=LOG_OF_ZERO) * LOG2_E, (1, 0)).unsqueeze(-2)
    in_segment = torch.mul(padded, ones.triu(1), out=out)  # row j holds log gate l for every l > j
    return in_segment.cumsum_(-1).add_(ones.tril(-1), alpha=LOG_OF_ZERO).exp2_().mT


def segment_decay_adjoint(change: Tensor) -> Tensor:
    """Gradient of the log gates from ``change`` = gradient of a decay * the decay, which is overwritten.

    Log gate l is in every segment that begins before l and ends at l or later.
    """
    begins_before = change.mT.cumsum_(-2)[..., :-1, 1:]  # row l, column i, both from 1: sum over j < l
    return begins_before.mul_(begins_before.new_ones(begins_before.shape[-2:]).triu()).sum(-1)


def momentum_coefficients(
    log_alpha: Tensor, log_mu: Tensor, beta: Tensor, eta: Tensor, take: Take | None = None
) -> Coefficients:
    """From gates ``[Z, C]``. ``take`` gives memory for names and shapes; without it autograd can follow."""
    pairs, size = beta.shape

    def memory(name: str, *leading: int) -> Tensor | None:
        return None if take is None else take(name, *leading, pairs, size + 1, size + 1)

    decay_alpha, decay_mu = segment_decay(torch.stack([log_alpha, log_mu]), out=memory("decays", 2))
    row_of_eta, column_of_beta = _initial_state_is_written(eta), _no_write_at_start(beta)
    written = _transposed_product(decay_mu, row_of_eta, memory("written"))
    scaled = _transposed_product(written, column_of_beta, memory("scaled"))
    gamma = torch.bmm(decay_alpha, scaled, out=memory("gamma"))
    return Coefficients(decay_alpha, decay_mu, written, scaled, gamma)


def momentum_coefficients_adjoint(
    grad_abar: Tensor,
    grad_written_end: Tensor,
    grad_gamma: Tensor,
    of: Coefficients,
    beta: Tensor,
    eta: Tensor,
    take: Take,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of log_alpha, log_mu, beta and eta ``[Z, C]``.

    Besides gamma, the chunk form reads only column 0 of decay_alpha and the last row of ``written``: ``grad_abar`` and
    ``grad_written_end``, ``[Z, C+1]``.
    """
    changes = take("changes", 2, *of.gamma.shape).mT
    change_alpha, change_mu = changes  # gradients, then gradients times the decays
    torch.bmm(of.scaled, grad_gamma.mT, out=change_alpha.mT)
    change_alpha[..., 0] += grad_abar
    change_alpha.mul_(of.decay_alpha)

    torch.bmm(grad_gamma.mT, of.decay_alpha, out=change_mu.mT)  # not yet times beta
    grad_beta = torch.mul(change_mu, of.written, out=of.scaled).sum(-1)[:, 1:]
    change_mu.mul_(_no_write_at_start(beta))
    change_mu[:, -1] += grad_written_end
    change_mu.mul_(of.decay_mu)
    grad_eta = change_mu.sum(-2)[:, 1:]
    change_mu.mul_(_initial_state_is_written(eta))
    grad_log_alpha, grad_log_mu = segment_decay_adjoint(changes)
    return grad_log_alpha, grad_log_mu, grad_beta, grad_eta


def _transposed_product(matrix: Tensor, factor: Tensor, out: Tensor | None) -> Tensor:
    """matrix * factor, stored transposed as the matrix is."""
    return torch.mul(matrix.mT, factor.mT, out=out).mT


def _no_write_at_start(beta: Tensor) -> Tensor:
    """``[Z, C]`` to a column ``[Z, C+1, 1]``: nothing is written at index 0."""
    return F.pad(beta, (1, 0)).unsqueeze(-1)


def _initial_state_is_written(eta: Tensor) -> Tensor:
    """``[Z, C]`` to a row ``[Z, 1, C+1]``: what the chunk began with counts in full."""
    return F.pad(eta, (1, 0), value=1.0).unsqueeze(-2)

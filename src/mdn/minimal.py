"""Momentum DeltaNet in one file: the stepwise momentum delta rule, as it is defined and as it is computed in chunks.

Per head, with keys k, queries q in R^K, values v in R^V and four gates per token (alpha, mu in [0, 1], beta, eta >= 0):

    r_t = v_t - S_{t-1}^T p_t               prediction error, p_t = alpha_t k_t                         (1)
    M_t = mu_t M_{t-1} - eta_t k_t r_t^T    momentum: a decaying sum of gradients
    S_t = alpha_t S_{t-1} - beta_t M_t      fast weight: a step along the momentum
    o_t = S_t^T q_t / sqrt(K)               output

Shapes as in the library: q, k [B, T, H, K]; v, o [B, T, H, V]; gates [B, T, H] (alpha and mu as logs; -inf is a hard
zero); states S, M [B, H, K, V]. Queries and keys have unit length. Equation numbers are those of docs/derivation.md,
names those of docs/notation.md. Run this file to see both forms and their gradients agree.
The library form, with packing, other dtypes and a fast backward pass: ``mdn.ops.chunk_momentum_delta_rule``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    log_alpha: Tensor  # [B, T, H], as are the next three
    log_mu: Tensor
    beta: Tensor
    eta: Tensor

    def tokens(self, start: int, end: int) -> "Inputs":
        return Inputs(*(x[:, start:end] for x in self))


def recurrence(inputs: Inputs, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one token after another. Returns o, and S and M after the last token."""
    outputs = []
    for t in range(inputs.q.shape[1]):
        q, k, v, log_alpha, log_mu, beta, eta = (x[:, t].unsqueeze(-1) for x in inputs)  # [B, H, D, 1], [B, H, 1]
        alpha, mu, beta, eta = (x.unsqueeze(-1) for x in (log_alpha.exp(), log_mu.exp(), beta, eta))  # [B, H, 1, 1]
        residual = v - S.mT @ (alpha * k)  # [B, H, V, 1]
        M = mu * M - eta * k @ residual.mT
        S = alpha * S - beta * M
        outputs.append((S.mT @ q).squeeze(-1) * q.shape[-2] ** -0.5)
    return torch.stack(outputs, dim=1), S, M


def decay(log_gate: Tensor) -> Tensor:
    """[..., C] to [..., C + 1, C + 1]: entry (i, j) is the product of the gates of tokens j+1..i, zero above. (3)

    Each entry is the exponential of a sum over its own segment, not of a difference of two long sums: then a gate of
    exactly zero (log = -inf) gives zeros instead of NaN, and a tiny gate does not spoil its neighbours.
    """
    log_gate = F.pad(log_gate, (1, 0))  # index 0 is the chunk's start
    rows = log_gate.unsqueeze(-1).expand(*log_gate.shape, log_gate.shape[-1])
    segments = rows.tril(-1)  # row i holds log gate i in columns j < i
    return segments.cumsum(-2).exp().tril()


def one_chunk(inputs: Inputs, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of a chunk at once, exactly. S and M are the states before it; heads move in front of tokens."""
    q, k, v, log_alpha, log_mu, beta, eta = (x.transpose(1, 2) for x in inputs)  # [B, H, C, D], [B, H, C]
    p = log_alpha.exp().unsqueeze(-1) * k

    # 1. The weight of a write at token j after token i, in M and in S. Column 0 is the weight of the states before the
    #    chunk: the initial momentum counts as a write with eta = 1, at a token that takes no step (beta = 0).   (4, 5)
    decay_alpha, decay_mu = decay(log_alpha), decay(log_mu)  # [B, H, C + 1, C + 1]
    gamma_M = decay_mu * F.pad(eta, (1, 0), value=1.0).unsqueeze(-2)
    gamma_S = decay_alpha @ (F.pad(beta, (1, 0)).unsqueeze(-1) * gamma_M)
    abar, b, mbar = decay_alpha[..., :1], gamma_S[..., :1], gamma_M[..., :1]  # [B, H, C + 1, 1]

    # 2. The errors. Token i probes S as it was after token i - 1, so with the row before; its own write and all later
    #    ones have weight zero there, which makes the system triangular.                                            (6)
    erase = (p @ k.mT) * gamma_S[..., :-1, 1:]  # [B, H, C, C], strictly lower
    target = v - abar[..., :-1, :] * (p @ S) + b[..., :-1, :] * (p @ M)  # [B, H, C, V]
    residual = torch.linalg.solve_triangular(erase, target, upper=False, unitriangular=True)

    # 3. The outputs read S after their own token.                                                                  (7)
    attend = (q @ k.mT) * gamma_S[..., 1:, 1:]  # [B, H, C, C], lower
    o = abar[..., 1:, :] * (q @ S) - b[..., 1:, :] * (q @ M) + attend @ residual

    # 4. The states after the chunk.                                                                                (8)
    write_S, write_M = gamma_S[..., -1, 1:].unsqueeze(-1), gamma_M[..., -1, 1:].unsqueeze(-1)  # [B, H, C, 1]
    next_S = abar[..., -1:, :] * S - b[..., -1:, :] * M + k.mT @ (write_S * residual)
    next_M = mbar[..., -1:, :] * M - k.mT @ (write_M * residual)
    return o.transpose(1, 2) * q.shape[-1] ** -0.5, next_S, next_M


def chunkwise(inputs: Inputs, S: Tensor, M: Tensor, chunk_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers as ``recurrence``: chunk after chunk, any length, any chunk size."""
    outputs = []
    for start in range(0, inputs.q.shape[1], chunk_size):
        o, S, M = one_chunk(inputs.tokens(start, start + chunk_size), S, M)
        outputs.append(o)
    return torch.cat(outputs, dim=1), S, M


def random_inputs(B: int, T: int, H: int, K: int, V: int) -> tuple[Inputs, Tensor, Tensor]:
    """Unit queries and keys, and gates inside the bounds of the paper's layer; some momentum gates are exactly zero."""
    q, k = F.normalize(torch.randn(2, B, T, H, K, dtype=torch.float64), dim=-1)
    v = torch.randn(B, T, H, V, dtype=torch.float64)
    uniform = torch.rand(4, B, T, H, dtype=torch.float64)
    eta = 2 * uniform[0]
    angle = torch.atan(4 * eta * uniform[1])  # alpha = cos^2 and beta = sin^2: together they never exceed one
    log_alpha, beta = 2 * angle.cos().log(), angle.sin().square()
    log_mu = (-2 * uniform[2]).masked_fill(uniform[3] < 0.1, float("-inf"))
    S, M = torch.randn(2, B, H, K, V, dtype=torch.float64)
    return Inputs(q, k, v, log_alpha, log_mu, beta, eta), S, M


if __name__ == "__main__":
    torch.manual_seed(0)
    for length, size in ((1, 64), (100, 16), (100, 64), (200, 64)):
        inputs, S, M = random_inputs(2, length, 3, 16, 24)
        leaves = [x.requires_grad_() for x in (*inputs, S, M)]
        forms = recurrence(inputs, S, M), chunkwise(inputs, S, M, size)
        grads = [torch.autograd.grad([x.square().sum() for x in form], leaves) for form in forms]
        result, gradient = (max((x - y).abs().max().item() for x, y in zip(*pair)) for pair in (forms, grads))
        print(f"{length:4} tokens, chunks of {size}: results differ by {result:.0e}, gradients by {gradient:.0e}")

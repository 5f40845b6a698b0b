"""The momentum delta rule with a decay for every key dimension in one file, as it is defined and in chunks.

    r_t = v_t - S_{t-1}^T (alpha_t * k_t)                            alpha_t in [0, 1]^K, mu_t in [0, 1] or [0, 1]^K
    M_t = mu_t * M_{t-1} - eta_t k_t r_t^T
    S_t = alpha_t * S_{t-1} - beta_t M_t + direct_t k_t r_t^T        o_t = S_t^T q_t / sqrt(K)

beta = 0 is KDA; one alpha for all dimensions and direct = 0 is minimal.py. Shapes of one head: q, k, alpha, mu [T, K];
v, o [T, V]; beta, eta, direct [T, 1]; S, M [K, V]. Equation numbers are those of docs/derivation.md. Run this file
to see both forms agree. The library form: ``mdn.ops.chunk_vector_momentum_delta_rule``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    mu: Tensor
    beta: Tensor
    eta: Tensor
    direct: Tensor


class Run(NamedTuple):
    """Neighbouring tokens: what they read and write as rows over X = [S; M], seen from the run's start and end."""

    read_q: Tensor  # [n, 2K], as are the next two
    read_p: Tensor
    write: Tensor
    scores_q: Tensor  # [n, n], as is the next one
    scores_p: Tensor
    step: Tensor  # [2K, 2K]: what the run does to X without writes; diagonal blocks, written out for clarity


def recurrence(x: Inputs, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one token after another."""
    outputs = []
    for q, k, v, alpha, mu, beta, eta, direct in zip(*x):
        write = torch.outer(k, v - S.T @ (alpha * k))
        M = mu.unsqueeze(-1) * M - eta * write
        S = alpha.unsqueeze(-1) * S - beta * M + direct * write
        outputs.append(S.T @ q * len(q) ** -0.5)
    return torch.stack(outputs), S, M


def one_token(q: Tensor, k: Tensor, alpha: Tensor, mu: Tensor, beta: Tensor, eta: Tensor, direct: Tensor) -> Run:
    """(26)"""
    zero, at_once = torch.zeros_like(k), beta * eta + direct
    step = torch.cat([torch.cat([alpha.diag(), -(beta * mu).diag()], 1), torch.cat([zero.diag(), mu.diag()], 1)])
    read_q, read_p = torch.cat([alpha * q, -beta * mu * q]), torch.cat([alpha * k, zero])
    write = torch.cat([at_once * k, -eta * k])
    read_q, read_p, write = (x.unsqueeze(0) for x in (read_q, read_p, write))
    return Run(read_q, read_p, write, (at_once * (q @ k)).reshape(1, 1), torch.zeros(1, 1, dtype=k.dtype), step)


def merge(first: Run, second: Run) -> Run:
    """(27): nothing is divided, and all terms of a coefficient have the same sign."""

    def scores(of_first: Tensor, of_second: Tensor, reads: Tensor) -> Tensor:
        above = F.pad(of_first, (0, len(second.write)))
        return torch.cat([above, torch.cat([reads @ first.write.T, of_second], 1)])

    return Run(
        torch.cat([first.read_q, second.read_q @ first.step]),
        torch.cat([first.read_p, second.read_p @ first.step]),
        torch.cat([first.write @ second.step.T, second.write]),
        scores(first.scores_q, second.scores_q, second.read_q),
        scores(first.scores_p, second.scores_p, second.read_p),
        second.step @ first.step,
    )


def chunkwise(x: Inputs, S: Tensor, M: Tensor, chunk_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers as ``recurrence``: runs merged in pairs, chunk after chunk."""
    outputs, X = [], torch.cat([S, M])
    for start in range(0, len(x.q), chunk_size):
        chunk = Inputs(*(y[start : start + chunk_size] for y in x))
        runs = [one_token(*rest) for rest in zip(chunk.q, chunk.k, *chunk[3:])]
        while len(runs) > 1:
            pairs = [merge(*runs[i : i + 2]) for i in range(0, len(runs) - 1, 2)]
            runs = pairs + runs[2 * len(pairs) :]
        run = runs[0]
        target = chunk.v - run.read_p @ X  # (28)
        residual = torch.linalg.solve_triangular(run.scores_p, target, upper=False, unitriangular=True)
        outputs.append((run.read_q @ X + run.scores_q @ residual) * x.q.shape[-1] ** -0.5)
        X = run.step @ X + run.write.T @ residual
    S, M = X.chunk(2)
    return torch.cat(outputs), S, M


def random_inputs(T: int, K: int, V: int) -> tuple[Inputs, Tensor, Tensor]:
    """Unit queries and keys; some gates are exactly zero."""
    q, k = F.normalize(torch.randn(2, T, K, dtype=torch.float64), dim=-1)
    alpha, mu = torch.rand(2, T, K, dtype=torch.float64).masked_fill(torch.rand(2, T, K) < 0.1, 0.0)
    beta, eta, direct = torch.rand(3, T, 1, dtype=torch.float64)
    S, M = torch.randn(2, K, V, dtype=torch.float64)
    return Inputs(q, k, torch.randn(T, V, dtype=torch.float64), alpha, mu, beta, eta, direct), S, M


if __name__ == "__main__":
    torch.manual_seed(0)
    for length, size in ((1, 16), (50, 8), (50, 16)):
        x, S, M = random_inputs(length, 8, 12)
        leaves = [y.requires_grad_() for y in (*x, S, M)]
        forms = recurrence(x, S, M), chunkwise(x, S, M, size)
        grads = [torch.autograd.grad([y.square().sum() for y in form], leaves) for form in forms]
        result, gradient = (max((y - z).abs().max().item() for y, z in zip(*pair)) for pair in (forms, grads))
        print(f"{length:3} tokens, chunks of {size}: results differ by {result:.0e}, gradients by {gradient:.0e}")

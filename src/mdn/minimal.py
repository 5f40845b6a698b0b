"""Momentum DeltaNet in one file: the stepwise momentum delta rule, as it is defined and as it is computed in chunks.

Per head, with keys k, queries q in R^K, values v in R^V and four gates per token (alpha, mu in [0, 1], beta, eta >= 0):

    r_t = v_t - S_{t-1}^T p_t               prediction error, p_t = alpha_t k_t
    M_t = mu_t M_{t-1} - eta_t k_t r_t^T    momentum: a decaying sum of gradients
    S_t = alpha_t S_{t-1} - beta_t M_t      fast weight: a step along the momentum
    o_t = S_t^T q_t / sqrt(K)               read-out

Shapes: q, k [B, H, T, K]; v, o [B, H, T, V]; gates [B, H, T] (alpha and mu as logs, -inf is a hard zero); states S, M
[B, H, K, V]. Queries and keys have unit length. Run this file to see both forms and their gradients agree.
The library form, with packing, other dtypes and a fast backward: ``mdn.ops.chunk_momentum_delta_rule``.
"""

import torch
from torch import Tensor


def recurrence(q, k, v, log_alpha, log_mu, beta, eta, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one token after another. Returns outputs, last fast weight, last momentum."""
    outputs = []
    for t in range(q.shape[2]):
        query, key, value = q[:, :, t], k[:, :, t], v[:, :, t]
        alpha, mu = log_alpha[:, :, t, None, None].exp(), log_mu[:, :, t, None, None].exp()
        probe = alpha[..., 0] * key
        error = value - torch.einsum("bhkv,bhk->bhv", S, probe)
        M = mu * M - eta[:, :, t, None, None] * torch.einsum("bhk,bhv->bhkv", key, error)
        S = alpha * S - beta[:, :, t, None, None] * M
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, query) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=2), S, M


def decay(log_gate: Tensor) -> Tensor:
    """L[i, j] = product of the gates j+1..i: ones on the diagonal, zero above.

    Each entry is the exponential of a sum over its own segment, not of a difference of two long sums: then a gate of
    exactly zero (log = -inf) gives zeros instead of NaN, and a tiny gate does not spoil its neighbours.
    """
    size = log_gate.shape[-1]
    segments = log_gate.unsqueeze(-1).expand(*log_gate.shape, size).tril(-1)  # row i holds log gate i in columns j < i
    return segments.cumsum(-2).exp().tril()


def before(x: Tensor, first: float) -> Tensor:
    """The same rows one token earlier: row i is what held before token i."""
    return torch.cat([torch.full_like(x[:, :, :1], first), x[:, :, :-1]], dim=2)


def one_chunk(q, k, v, log_alpha, log_mu, beta, eta, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of a chunk at once, exactly. S and M are the states before it.

    S after token i is  abar_i S - b_i M + sum_{j <= i} Gamma[i, j] khat_j r_j^T,  which makes the errors r the solution
    of a triangular system.
    """
    L_alpha, L_mu = decay(log_alpha), decay(log_mu)
    abar, mbar = log_alpha.cumsum(-1).exp(), log_mu.cumsum(-1).exp()  # what is left of the states before the chunk
    Gamma = L_alpha @ (beta.unsqueeze(-1) * L_mu)  # what a write at token j is worth in S after token i
    b = (L_alpha @ (beta * mbar).unsqueeze(-1)).squeeze(-1)  # what the old momentum has added to S by token i
    p, khat = log_alpha.exp().unsqueeze(-1) * k, eta.unsqueeze(-1) * k

    strictly_lower = (p @ khat.mT) * before(Gamma, 0.0)
    target = v - before(abar, 1.0).unsqueeze(-1) * (p @ S) + before(b, 0.0).unsqueeze(-1) * (p @ M)
    R = torch.linalg.solve_triangular(strictly_lower, target, upper=False, unitriangular=True)

    o = abar.unsqueeze(-1) * (q @ S) - b.unsqueeze(-1) * (q @ M) + ((q @ khat.mT) * Gamma) @ R
    end_alpha, end_mu, end_b = (x[:, :, -1, None, None] for x in (abar, mbar, b))
    write_S, write_M = Gamma[:, :, -1].unsqueeze(-1) * khat, L_mu[:, :, -1].unsqueeze(-1) * khat
    return o * q.shape[-1] ** -0.5, end_alpha * S - end_b * M + write_S.mT @ R, end_mu * M - write_M.mT @ R


def chunkwise(q, k, v, log_alpha, log_mu, beta, eta, S: Tensor, M: Tensor, *, chunk_size: int = 64):
    """The same numbers as ``recurrence``: chunk after chunk, any length, any chunk size."""
    outputs = []
    for start in range(0, q.shape[2], chunk_size):
        chunk = (x[:, :, start : start + chunk_size] for x in (q, k, v, log_alpha, log_mu, beta, eta))
        o, S, M = one_chunk(*[*chunk, S, M])
        outputs.append(o)
    return torch.cat(outputs, dim=2), S, M


def random_inputs(batch: int, heads: int, time: int, key_dim: int, value_dim: int) -> list[Tensor]:
    """Unit queries and keys, and gates inside the bounds of the paper's layer; some momentum gates are exactly zero."""
    gate = lambda: torch.rand(batch, heads, time, dtype=torch.float64)  # noqa: E731
    vectors = torch.randn(2, batch, heads, time, key_dim, dtype=torch.float64)
    q, k = torch.nn.functional.normalize(vectors, dim=-1)
    v = torch.randn(batch, heads, time, value_dim, dtype=torch.float64)
    eta = 2 * gate()
    angle = torch.atan(4 * eta * gate())  # alpha <= cos^2, beta <= sin^2: together they never exceed one
    log_alpha, beta = 2 * angle.cos().log(), angle.sin().square()
    log_mu = (-2 * gate()).masked_fill(gate() < 0.1, float("-inf"))
    S, M = torch.randn(2, batch, heads, key_dim, value_dim, dtype=torch.float64)
    return [q, k, v, log_alpha, log_mu, beta, eta, S, M]


def largest_differences(inputs: list[Tensor], chunk_size: int) -> tuple[float, float]:
    """Between recurrence and chunk form: of the results, and of the gradients of all nine inputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    results = recurrence(*inputs), chunkwise(*inputs, chunk_size=chunk_size)
    gradients = [torch.autograd.grad([x.square().sum() for x in result], inputs) for result in results]
    return _largest_difference(*results), _largest_difference(*gradients)


def _largest_difference(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> float:
    return torch.cat([(x - y).abs().flatten() for x, y in zip(first, second)]).max().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for length, size in ((1, 64), (100, 16), (100, 64), (200, 64)):
        result, gradient = largest_differences(random_inputs(2, 3, length, 16, 24), size)
        print(f"{length:4} tokens, chunks of {size}: results differ by {result:.0e}, gradients by {gradient:.0e}")

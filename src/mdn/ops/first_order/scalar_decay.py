"""First-order rules whose state decays by one number per head and token, chunk by chunk.

    r_t = v_t - S_{t-1}^T p_t                  no p: r_t = v_t
    S_t = a_t S_{t-1} + b_t k_t r_t^T          o_t = S_t^T q_t

With p = a k this is the gated delta rule, with another p Comba, without p Mamba2's state update. In a chunk, with
L[i, j] = a_{j+1} ... a_i (i >= j), abar the decay since the chunk began, and "prev" for one row earlier (of L: zeros
first, of abar: a one):

    (I + (P K^T * L_prev) diag(b)) R = V - diag(abar_prev) P S0
    O  = diag(abar) Q S0 + (Q K^T * L) diag(b) R
    S' = abar[-1] S0 + (diag(L[-1] b) K)^T R

L is built from sums over segments of logarithms, so every exponent is <= 0 and `-inf` gives exact zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import Inputs
from .layout import chunk_layout
from .native import native_scalar_decay
from .state_scan import state_scan


def chunk_scalar_decay(
    inputs: Inputs,
    p: Tensor | None,
    log_decay: Tensor,
    beta: Tensor,
    chunk_size: int,
    backend: str,
    read_decayed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, HV, V]` and final states `[N, HV, K, V]`, in the dtype of the computation.

    `read_decayed` multiplies p by the decay: the error is read at the decayed state.
    """
    if backend == "cpu":
        return native_scalar_decay(inputs, p, log_decay, beta, chunk_size, read_decayed)
    if read_decayed and p is not None:
        p = log_decay.exp().unsqueeze(-1) * p
    layout = chunk_layout(inputs.v, inputs.boundaries, chunk_size)
    initial = layout.rank_states(inputs.initial_state)
    with torch.autocast(inputs.v.device.type, enabled=False):
        q, k, v = layout.split(inputs.q), layout.split(inputs.k), layout.split(inputs.v)
        g, beta = layout.split(log_decay), layout.split(beta)
        decays = segment_decays(g)
        since_start = g.cumsum(-1).exp().unsqueeze(-1)
        weights = decays * beta.unsqueeze(-2)
        write = k * weights[..., -1, :].unsqueeze(-1)
        whole = since_start[..., -1:, :]
        if p is None:
            starts, _, final = state_scan(whole, initial, layout.steps, E=write.transpose(-1, -2) @ v)
            errors = v
        else:
            p = layout.split(p)
            system = (p @ k.transpose(-1, -2)) * F.pad(weights[..., :-1, :], (0, 0, 1, 0))
            right = torch.cat([v, F.pad(since_start[..., :-1, :], (0, 0, 1, 0), value=1.0) * p], -1)
            U, W = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
                [v.shape[-1], p.shape[-1]], -1
            )
            starts, errors, final = state_scan(whole, initial, layout.steps, U, W, write)
        output = (since_start * q) @ starts + ((q @ k.transpose(-1, -2)) * weights) @ errors
    return layout.join(output), layout.unrank_states(final)


def segment_decays(log_decay: Tensor) -> Tensor:
    """`[..., C]` logarithms to L `[..., C, C]`: the product of the decays of tokens j+1..i, zero above the diagonal."""
    size = log_decay.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, size)
    sums = steps.masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    return sums.exp().masked_fill(~lower, 0.0)

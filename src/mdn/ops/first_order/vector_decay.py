"""First-order rules whose state decays by its own number in every key dimension, chunk by chunk.

    x_t = S_{t-1}^T a_t
    S_t = diag(exp g_t) S_{t-1} + k_t v_t^T + b_t x_t^T          o_t = S_t^T q_t

Without a and b this is GLA, with both RWKV-7. With a but without b, b is -k (the delta form: k_t (v_t - x_t)^T), which
is KDA for a_t = exp(g_t) * k_t. `A_ak` and its like are products with the decay between two tokens (decayed_scores.py):

    X  = (I - A_ab)^-1 (A_ak V + Abar_prev S0)
    O  = Qbar S0 + A_qk V + A_qb X
    S' = diag(exp sum g) S0 + Kbar^T V + Bbar^T X

where Qbar and Abar_prev are decayed from the chunk's start and Kbar and Bbar up to its end. Every exponent is <= 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .decayed_scores import decayed_scores
from .inputs import Inputs
from .layout import ChunkLayout, chunk_layout
from .state_scan import state_scan


def chunk_vector_decay(
    inputs: Inputs, log_decay: Tensor, a: Tensor | None, b: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, HV, V]` and final states `[N, HV, K, V]`, in the dtype of the computation."""
    layout = chunk_layout(inputs.v, inputs.boundaries, chunk_size)
    with torch.autocast(inputs.v.device.type, enabled=False):
        if a is None:
            output, final = _gated(inputs, log_decay, layout)
        else:
            output, final = _low_rank(inputs, log_decay, a, b, layout)
    return layout.join(output), layout.unrank_states(final)


def _gated(inputs: Inputs, log_decay: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    q, k, v, g = (layout.split(x) for x in (inputs.q, inputs.k, inputs.v, log_decay))
    since_start, until_end = _chunk_decays(g)
    initial = layout.rank_states(inputs.initial_state)
    added = (k * until_end).transpose(-1, -2) @ v
    starts, _, final = state_scan(_whole(since_start), initial, layout.steps, E=added)
    scores = decayed_scores(q.unsqueeze(-3), k.unsqueeze(-3), g)[..., 0, 0, :, :]
    return (q * since_start) @ starts + scores @ v, final


def _low_rank(
    inputs: Inputs, log_decay: Tensor, a: Tensor, b: Tensor | None, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    q, k, v, g, a = (layout.split(x) for x in (inputs.q, inputs.k, inputs.v, log_decay, a))
    since_start, until_end = _chunk_decays(g)
    initial = layout.rank_states(inputs.initial_state)
    reads = a * _one_row_down(since_start, first=1.0)
    # a_t meets the state before token t decays it: seen from a_t the clock stands at t - 1.
    left = torch.stack([q, F.pad(a[..., 1:, :], (0, 0, 0, 1))], -3)
    if b is None:  # R = V - X obeys (I + A_ak) R = V - Abar_prev S0, and everything is written along k
        from_q, from_a = decayed_scores(left, k.unsqueeze(-3), g).squeeze(-3).unbind(-3)
        U, W = _solve(_one_row_down(from_a), v, reads)
        starts, errors, final = state_scan(_whole(since_start), initial, layout.steps, U, W, k * until_end)
        return (q * since_start) @ starts + from_q @ errors, final
    b = layout.split(b)
    from_q, from_a = decayed_scores(left, torch.stack([k, b], -3), g).unbind(-4)
    along_k, along_b = _one_row_down(from_a).unbind(-3)
    U, W = _solve(-along_b, along_k @ v, -reads)
    added = (k * until_end).transpose(-1, -2) @ v
    starts, x, final = state_scan(_whole(since_start), initial, layout.steps, U, W, b * until_end, added)
    return (q * since_start) @ starts + from_q[..., 0, :, :] @ v + from_q[..., 1, :, :] @ x, final


def _solve(system: Tensor, values: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
    """(I + system)^-1 applied to values `[..., C, V]` and reads `[..., C, K]`; system is strictly lower triangular."""
    solution = torch.linalg.solve_triangular(system, torch.cat([values, reads], -1), upper=False, unitriangular=True)
    values, reads = solution.split([values.shape[-1], reads.shape[-1]], -1)
    return values, reads


def _chunk_decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., C, K]`: decay from the chunk's start through each token, and from after each token to the chunk's end."""
    following = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return g.cumsum(-2).exp(), following.flip(-2).cumsum(-2).flip(-2).exp()


def _whole(since_start: Tensor) -> Tensor:
    """The decay of a whole chunk, `[..., K, 1]`."""
    return since_start[..., -1, :].unsqueeze(-1)


def _one_row_down(x: Tensor, first: float = 0.0) -> Tensor:
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=first)

"""Kernel: gradients of the [C, C] matrices of a chunk, one program per (chunk, value head).

Writes, as rows of [tokens, HV, C]:
    q_weights   do R^T times all factors of the scores but eta and the raw product q k^T
    p_weights   the same for the overlaps P Khat^T, from E (the gradient of v); the first row of a chunk has none
    d_gamma     the gradient of Gamma through both, except for its last row's part in the states (float32)
The overlaps of token t + 1 meet row t of Gamma. So p and E are read one token ahead, and p_weights is written one token
ahead: no matrix has to be shifted.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import add_product, inverse_norm, load_gate, load_tile, locate_chunk, product, store_tile


@triton.jit
def similarity_over_values(
    x,
    y,
    x_first,
    x_left,
    first,
    left,
    head,
    HV: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """x y^T [C, C] of two [tokens, HV, V] tensors; x may begin at another token."""
    total = tl.zeros([C, C], COMPUTE)
    for column in range(0, V, BV):
        x_tile = load_tile(x, x_first, x_left, head, HV, column, V, C, BV)
        y_tile = load_tile(y, first, left, head, HV, column, V, C, BV)
        total = add_product(total, x_tile, tl.trans(y_tile), PRECISION, COMPUTE)
    return total


@triton.jit
def backward_scores_kernel(
    grad_o,
    q,
    k,
    p,
    log_alpha,
    eta,
    residual,
    dv,
    gamma,
    q_weights,
    p_weights,
    d_gamma,
    chunk_indices,
    cu_seqlens,
    time,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    P_TIMES_ALPHA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1)
    key_head = head // (HV // H)
    first, left, _ = locate_chunk(tl.program_id(0), chunk_indices, cu_seqlens, time, C, PACKED)
    ahead = first + 1
    left_ahead = tl.minimum(left, C) - 1
    rows = tl.arange(0, C)
    lower = rows[:, None] >= rows[None, :]

    k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
    k_factor = inverse_norm(k_tile, L2NORM, C, COMPUTE)
    eta_rows = load_gate(eta, first, left, head, HV, C, COMPUTE)
    gamma_tile = load_tile(gamma, first, left, head, HV, 0, C, C, C)

    # Eta stays outside the weights, so that its own gradient needs no division (it may be zero).
    q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
    q_factor = inverse_norm(q_tile, L2NORM, C, COMPUTE) * scale
    d_scores = similarity_over_values(
        grad_o, residual, first, left, first, left, head, HV, V, C, BV, PRECISION, COMPUTE
    )
    d_scores *= q_factor[:, None] * k_factor[None, :]
    store_tile(q_weights, d_scores * gamma_tile, first, left, head, HV, 0, C, C, C)
    total = d_scores * product(q_tile, tl.trans(k_tile), PRECISION, COMPUTE)

    p_tile = load_tile(k if p is None else p, ahead, left_ahead, key_head, H, 0, K, C, BK)
    p_factor = inverse_norm(p_tile, L2NORM, C, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor = p_factor * tl.exp(load_gate(log_alpha, ahead, left_ahead, head, HV, C, COMPUTE))
    d_overlap = similarity_over_values(
        dv, residual, ahead, left_ahead, first, left, head, HV, V, C, BV, PRECISION, COMPUTE
    )
    d_overlap *= -p_factor[:, None] * k_factor[None, :]
    store_tile(p_weights, d_overlap * gamma_tile, ahead, left_ahead, head, HV, 0, C, C, C)
    total += d_overlap * product(p_tile, tl.trans(k_tile), PRECISION, COMPUTE)
    total = tl.where(lower, total * eta_rows[None, :], 0.0)
    store_tile(d_gamma, total, first, left, head, HV, 0, C, C, C)

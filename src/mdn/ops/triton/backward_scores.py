"""Kernel: gradients of the [C, C] matrices of a chunk, one program per (chunk, value head).

Writes, as rows of [tokens, HV, C]:
    q_weights   do R^T times all factors of the scores but eta and the raw product q k^T
    p_weights   the same for the overlaps P Khat^T, from E (the gradient of v); the first row of a chunk is zero
    d_gamma     the gradient of Gamma through both, except for its last row's part in the states (float32)
The overlaps of token t + 1 meet row t of Gamma. So p and E are read one token ahead, and p_weights is written one token
ahead: no matrix has to be shifted.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import (
    RUNTIME_NUMBERS,
    inverse_norm,
    load_gate,
    load_tile,
    locate_chunk,
    similarity,
    store_tile,
)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
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

    k_factor = inverse_norm(load_tile(k, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE)
    eta_rows = load_gate(eta, first, left, head, HV, C, COMPUTE)
    gamma_tile = load_tile(gamma, first, left, head, HV, 0, C, C, C)

    # Eta stays outside the weights, so that its own gradient needs no division (it may be zero).
    q_factor = inverse_norm(load_tile(q, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE) * scale
    d_scores = similarity(grad_o, residual, first, left, first, left, head, HV, V, V, C, BV, PRECISION, COMPUTE)
    d_scores *= q_factor[:, None] * k_factor[None, :]
    store_tile(q_weights, d_scores * gamma_tile, first, left, head, HV, 0, C, C, C)
    total = d_scores * similarity(q, k, first, left, first, left, key_head, H, K, K, C, 16, PRECISION, COMPUTE)

    if p is None:
        probe = k
    else:
        probe = p
    p_factor = inverse_norm(load_tile(probe, ahead, left_ahead, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor = p_factor * tl.exp(load_gate(log_alpha, ahead, left_ahead, head, HV, C, COMPUTE))
    d_overlap = similarity(dv, residual, ahead, left_ahead, first, left, head, HV, V, V, C, BV, PRECISION, COMPUTE)
    d_overlap *= -p_factor[:, None] * k_factor[None, :]
    store_tile(p_weights, d_overlap * gamma_tile, ahead, left_ahead, head, HV, 0, C, C, C)
    tl.store(p_weights + (first * HV + head) * C + rows, tl.zeros([C], p_weights.dtype.element_ty))
    total += d_overlap * similarity(
        probe, k, ahead, left_ahead, first, left, key_head, H, K, K, C, 16, PRECISION, COMPUTE
    )
    total = tl.where(lower, total * eta_rows[None, :], 0.0)
    store_tile(d_gamma, total, first, left, head, HV, 0, C, C, C)

"""Kernel: everything of a chunk that does not depend on the states, one program per (chunk, value head).

Writes, for C tokens (names as in docs/kernels.md):
    inverse      [tokens, HV, C]   rows of (I + (P Khat^T) * Gamma_prev)^-1
    scores       [tokens, HV, C]   rows of scale (Q Khat^T) * Gamma, in the input dtype
    coefficients [6, tokens, HV]   what multiplies the raw rows of p, q and k in products with S and M
    decays       [chunks, HV, 4]   abar, b, mbar of the whole chunk (and a zero)
Alpha, eta, the scale and the L2 norms are all inside these coefficients: later kernels read q, k and p as given.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import (
    decay_mask,
    inverse_norm,
    last_row,
    load_gate,
    load_tile,
    locate_chunk,
    previous,
    product,
    row_shift,
    store_gate,
    store_tile,
    unit_lower_inverse,
)


@triton.jit
def coupled_decays(log_alpha, log_mu, beta, C: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """The two decay masks, Gamma = L_alpha diag(beta) L_mu, abar, mbar and b."""
    alpha_mask = decay_mask(log_alpha, C)
    mu_mask = decay_mask(log_mu, C)
    gamma = product(alpha_mask * beta[None, :], mu_mask, PRECISION, COMPUTE)
    abar = tl.exp(tl.cumsum(log_alpha, axis=0))
    mbar = tl.exp(tl.cumsum(log_mu, axis=0))
    b = tl.sum(alpha_mask * (beta * mbar)[None, :], axis=1)
    return alpha_mask, mu_mask, gamma, abar, mbar, b


@triton.jit
def store_coefficients(
    coefficients,
    read_s,
    read_m,
    query_s,
    query_m,
    write_s,
    write_m,
    first,
    left,
    head,
    heads,
    plane,
    C: tl.constexpr,
):
    store_gate(coefficients, read_s, first, left, head, heads, C)
    store_gate(coefficients + plane, read_m, first, left, head, heads, C)
    store_gate(coefficients + 2 * plane, query_s, first, left, head, heads, C)
    store_gate(coefficients + 3 * plane, query_m, first, left, head, heads, C)
    store_gate(coefficients + 4 * plane, write_s, first, left, head, heads, C)
    store_gate(coefficients + 5 * plane, write_m, first, left, head, heads, C)


@triton.jit
def prepare_kernel(
    q,
    k,
    p,
    log_alpha,
    log_mu,
    beta,
    eta,
    inverse,
    scores,
    coefficients,
    decays,
    chunk_indices,
    cu_seqlens,
    time,
    plane,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
    P_TIMES_ALPHA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1)
    key_head = head // (HV // H)
    first, left, row = locate_chunk(tl.program_id(0), chunk_indices, cu_seqlens, time, C, PACKED)

    log_alpha_rows = load_gate(log_alpha, first, left, head, HV, C, COMPUTE)
    log_mu_rows = load_gate(log_mu, first, left, head, HV, C, COMPUTE)
    beta_rows = load_gate(beta, first, left, head, HV, C, COMPUTE)
    _, mu_mask, gamma, abar, mbar, b = coupled_decays(log_alpha_rows, log_mu_rows, beta_rows, C, PRECISION, COMPUTE)

    k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
    k_factor = inverse_norm(k_tile, L2NORM, C, COMPUTE)
    write_factor = k_factor * load_gate(eta, first, left, head, HV, C, COMPUTE)

    q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
    q_factor = inverse_norm(q_tile, L2NORM, C, COMPUTE) * scale
    similarity = product(q_tile, tl.trans(k_tile), PRECISION, COMPUTE)
    store_tile(
        scores, similarity * gamma * q_factor[:, None] * write_factor[None, :], first, left, head, HV, 0, C, C, C
    )

    if p is None:
        p_tile = k_tile
        p_factor = k_factor
    else:
        p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)
        p_factor = inverse_norm(p_tile, L2NORM, C, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor = p_factor * tl.exp(log_alpha_rows)
    gamma_prev = product(row_shift(C, COMPUTE), gamma, PRECISION, COMPUTE)
    overlap = product(p_tile, tl.trans(k_tile), PRECISION, COMPUTE) * p_factor[:, None] * write_factor[None, :]
    solved = unit_lower_inverse(overlap * gamma_prev, C, PRECISION, COMPUTE)
    store_tile(inverse, solved, first, left, head, HV, 0, C, C, C)

    store_coefficients(
        coefficients,
        p_factor * previous(abar, 1.0, C),
        p_factor * previous(b, 0.0, C),
        q_factor * abar,
        q_factor * b,
        write_factor * last_row(gamma, C),
        write_factor * last_row(mu_mask, C),
        first,
        left,
        head,
        HV,
        plane,
        C,
    )
    rows = tl.arange(0, C)
    decay = decays + (row * HV + head) * 4
    tl.store(decay, tl.sum(tl.where(rows == C - 1, abar, 0.0), axis=0))
    tl.store(decay + 1, tl.sum(tl.where(rows == C - 1, b, 0.0), axis=0))
    tl.store(decay + 2, tl.sum(tl.where(rows == C - 1, mbar, 0.0), axis=0))

"""Kernel: everything of a chunk that does not depend on the states, one program per (chunk, value head).

Writes, for C tokens (names as in docs/kernels.md):
    inverse      [tokens, HV, C]   rows of (I + (P Khat^T) * Gamma_prev)^-1
    scores       [tokens, HV, C]   rows of scale (Q Khat^T) * Gamma, in the input dtype
    coefficients [8, tokens, HV]   what multiplies the raw rows of p, q, k, and k without eta, in products with S, M
    decays       [chunks, HV, 4]   abar, b and mbar of the whole chunk
    gamma        [tokens, HV, C]   rows of Gamma, only for the backward pass
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
    """The mu mask, Gamma = L_alpha diag(beta) L_mu, abar, mbar and b."""
    alpha_mask = decay_mask(log_alpha, C)
    mu_mask = decay_mask(log_mu, C)
    gamma = product(alpha_mask * beta[None, :], mu_mask, PRECISION, COMPUTE)
    abar = tl.exp(tl.cumsum(log_alpha, axis=0))
    mbar = tl.exp(tl.cumsum(log_mu, axis=0))
    b = tl.sum(alpha_mask * (beta * mbar)[None, :], axis=1)
    return mu_mask, gamma, abar, mbar, b


@triton.jit
def store_coefficients(coefficients, which, of_s, of_m, first, left, head, heads, plane, C: tl.constexpr):
    """A pair of [C] vectors, as `load_coefficients` reads it."""
    pair = coefficients + 2 * which * plane
    store_gate(pair, of_s, first, left, head, heads, C)
    store_gate(pair + plane, of_m, first, left, head, heads, C)


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
    gamma,
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
    mu_mask, gamma_tile, abar, mbar, b = coupled_decays(log_alpha_rows, log_mu_rows, beta_rows, C, PRECISION, COMPUTE)
    if gamma is not None:
        store_tile(gamma, gamma_tile, first, left, head, HV, 0, C, C, C)

    k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
    k_factor = inverse_norm(k_tile, L2NORM, C, COMPUTE)
    write_factor = k_factor * load_gate(eta, first, left, head, HV, C, COMPUTE)

    q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
    q_factor = inverse_norm(q_tile, L2NORM, C, COMPUTE) * scale
    similarity = product(q_tile, tl.trans(k_tile), PRECISION, COMPUTE)
    store_tile(
        scores, similarity * gamma_tile * q_factor[:, None] * write_factor[None, :], first, left, head, HV, 0, C, C, C
    )

    if p is None:
        p_tile = k_tile
        p_factor = k_factor
    else:
        p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)
        p_factor = inverse_norm(p_tile, L2NORM, C, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor = p_factor * tl.exp(log_alpha_rows)
    gamma_prev = product(row_shift(C, COMPUTE), gamma_tile, PRECISION, COMPUTE)
    overlap = product(p_tile, tl.trans(k_tile), PRECISION, COMPUTE) * p_factor[:, None] * write_factor[None, :]
    solved = unit_lower_inverse(overlap * gamma_prev, C, PRECISION, COMPUTE)
    store_tile(inverse, solved, first, left, head, HV, 0, C, C, C)

    read_s = p_factor * previous(abar, 1.0, C)
    read_m = p_factor * previous(b, 0.0, C)
    store_coefficients(coefficients, 0, read_s, read_m, first, left, head, HV, plane, C)
    store_coefficients(coefficients, 1, q_factor * abar, q_factor * b, first, left, head, HV, plane, C)
    last_gamma = last_row(gamma_tile, C)
    last_mu = last_row(mu_mask, C)
    write_s = write_factor * last_gamma
    store_coefficients(coefficients, 2, write_s, write_factor * last_mu, first, left, head, HV, plane, C)
    store_coefficients(coefficients, 3, k_factor * last_gamma, k_factor * last_mu, first, left, head, HV, plane, C)
    rows = tl.arange(0, C)
    decay = decays + (row * HV + head) * 4
    tl.store(decay, tl.sum(tl.where(rows == C - 1, abar, 0.0), axis=0))
    tl.store(decay + 1, tl.sum(tl.where(rows == C - 1, b, 0.0), axis=0))
    tl.store(decay + 2, tl.sum(tl.where(rows == C - 1, mbar, 0.0), axis=0))

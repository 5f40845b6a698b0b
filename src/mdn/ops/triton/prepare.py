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

from mdn.ops.triton.blocks import inverse_norm, load_gate, load_tile, locate_chunk, similarity, store_gate, store_tile
from mdn.ops.triton.decays import (
    assemble,
    block_decays,
    block_product,
    carry_over_blocks,
    earlier_block_decays,
    unit_lower_inverse,
)


@triton.jit
def load_earlier_gate(tensor, first_token, tokens_left, head, heads, C: tl.constexpr, COMPUTE: tl.constexpr):
    """Row i holds the gate of token i - 1; row 0 and rows past the end hold zero."""
    rows = tl.arange(0, C)
    pointers = tensor + first_token * heads + head + (rows.to(tl.int64) - 1) * heads
    return tl.load(pointers, mask=(rows > 0) & (rows <= tokens_left), other=0.0).to(COMPUTE)


@triton.jit
def in_block_decays(log_alpha, earlier_log_alpha, C: tl.constexpr):
    """abar counted from the start of each block, up to each row and up to the row before: both [C / 16, 16]."""
    in_block = tl.reshape(log_alpha, [C // 16, 16])
    earlier = tl.where(tl.arange(0, 16)[None, :] > 0, tl.reshape(earlier_log_alpha, [C // 16, 16]), 0.0)
    return tl.exp(tl.cumsum(in_block, axis=1)), tl.exp(tl.cumsum(earlier, axis=1))


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
    key_dim,
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
    earlier_log_alpha = load_earlier_gate(log_alpha, first, left, head, HV, C, COMPUTE)
    beta_rows = tl.reshape(load_gate(beta, first, left, head, HV, C, COMPUTE), [C // 16, 16])

    # Inside blocks: the masks, Gamma, abar, b and mbar; "earlier" ones belong to the row before.
    alpha_blocks = block_decays(log_alpha_rows, C)
    mu_blocks = block_decays(log_mu_rows, C)
    earlier_blocks = earlier_block_decays(earlier_log_alpha, C)
    gamma_blocks = block_product(alpha_blocks * beta_rows[:, None, :], mu_blocks, PRECISION, COMPUTE)
    earlier_gamma = block_product(earlier_blocks * beta_rows[:, None, :], mu_blocks, PRECISION, COMPUTE)
    abar_in, abar_earlier = in_block_decays(log_alpha_rows, earlier_log_alpha, C)
    mbar_in = tl.exp(tl.cumsum(tl.reshape(log_mu_rows, [C // 16, 16]), axis=1))
    b_in = tl.sum(alpha_blocks * (beta_rows * mbar_in)[:, None, :], axis=2)
    b_earlier = tl.sum(earlier_blocks * (beta_rows * mbar_in)[:, None, :], axis=2)
    x_rows, y_rows, abar, b, mbar, last_gamma, last_mu, abar_total, b_total, mbar_total = carry_over_blocks(
        gamma_blocks, mu_blocks, abar_in, b_in, mbar_in, C, COMPUTE
    )
    decay = decays + (row * HV + head) * 4
    tl.store(decay, abar_total)
    tl.store(decay + 1, b_total)
    tl.store(decay + 2, mbar_total)

    k_factor = inverse_norm(load_tile(k, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE)
    write_factor = k_factor * load_gate(eta, first, left, head, HV, C, COMPUTE)
    write_s = write_factor * last_gamma
    store_coefficients(coefficients, 2, write_s, write_factor * last_mu, first, left, head, HV, plane, C)
    store_coefficients(coefficients, 3, k_factor * last_gamma, k_factor * last_mu, first, left, head, HV, plane, C)

    q_factor = inverse_norm(load_tile(q, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE) * scale
    abar_rows = tl.reshape(abar_in * abar[:, None], [C])
    b_rows = tl.reshape(abar_in * b[:, None] + b_in * mbar[:, None], [C])
    store_coefficients(coefficients, 1, q_factor * abar_rows, q_factor * b_rows, first, left, head, HV, plane, C)
    gamma_tile = assemble(gamma_blocks, abar_in, b_in, x_rows, y_rows, C)
    if gamma is not None:
        store_tile(gamma, gamma_tile, first, left, head, HV, 0, C, C, C)
    weighted = gamma_tile * q_factor[:, None] * write_factor[None, :]
    weighted *= similarity(q, k, first, left, first, left, key_head, H, key_dim, K, C, 16, PRECISION, COMPUTE)
    store_tile(scores, weighted, first, left, head, HV, 0, C, C, C)

    if p is None:
        probe = k
        p_factor = k_factor
    else:
        probe = p
        p_factor = inverse_norm(load_tile(p, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor = p_factor * tl.exp(log_alpha_rows)
    abar_rows = tl.reshape(abar_earlier * abar[:, None], [C])
    b_rows = tl.reshape(abar_earlier * b[:, None] + b_earlier * mbar[:, None], [C])
    store_coefficients(coefficients, 0, p_factor * abar_rows, p_factor * b_rows, first, left, head, HV, plane, C)
    overlap = assemble(earlier_gamma, abar_earlier, b_earlier, x_rows, y_rows, C)
    overlap *= p_factor[:, None] * write_factor[None, :]
    overlap *= similarity(probe, k, first, left, first, left, key_head, H, key_dim, K, C, 16, PRECISION, COMPUTE)
    solved = unit_lower_inverse(overlap, C, PRECISION, COMPUTE)
    store_tile(inverse, solved, first, left, head, HV, 0, C, C, C)

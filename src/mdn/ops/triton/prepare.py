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
    QUERY,
    READ,
    RUNTIME_NUMBERS,
    WRITE,
    WRITE_WITHOUT_ETA,
    inverse_norm,
    load_gate,
    load_tile,
    locate_chunk,
    similarity,
    stacked,
    store_gate,
    store_tile,
)
from mdn.ops.triton.decays import (
    assemble,
    block_product,
    carry_over_blocks,
    decay_parts,
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
def gamma_in_blocks(
    log_mu_rows, alpha_blocks, beta_rows, C: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr
):
    """Counted from the start of each block: Gamma [C / 16, 16, 16] and b [C / 16, 16]; and the mu mask and mbar."""
    mu_blocks, mbar_in = decay_parts(log_mu_rows, C)
    gamma_blocks = block_product(alpha_blocks * beta_rows[:, None, :], mu_blocks, PRECISION, COMPUTE)
    b_in = tl.sum(alpha_blocks * (beta_rows * mbar_in)[:, None, :], axis=2)
    return gamma_blocks, b_in, mu_blocks, mbar_in


@triton.jit
def earlier_decay_parts(log_alpha, first, left, head, HV: tl.constexpr, C: tl.constexpr, COMPUTE: tl.constexpr):
    """`decay_parts` of the rows before: row i holds what belongs to row i - 1, counted from row i's own block."""
    earlier = load_earlier_gate(log_alpha, first, left, head, HV, C, COMPUTE)
    in_block = tl.where(tl.arange(0, 16)[None, :] > 0, tl.reshape(earlier, [C // 16, 16]), 0.0)
    return earlier_block_decays(earlier, C), tl.exp(tl.cumsum(in_block, axis=1))


@triton.jit
def store_coefficients(coefficients, which, of_s, of_m, first, left, head, heads, plane, C: tl.constexpr):
    """A pair of [C] vectors, as `load_coefficients` reads it."""
    store_gate(stacked(coefficients, 2 * which, plane), of_s, first, left, head, heads, C)
    store_gate(stacked(coefficients, 2 * which + 1, plane), of_m, first, left, head, heads, C)


@triton.jit
def store_reading_coefficients(
    coefficients,
    which,
    factor,
    abar_in,
    b_in,
    abar,
    b,
    mbar,
    first,
    left,
    head,
    heads,
    plane,
    C: tl.constexpr,
):
    """factor times abar and b [C] of whole rows, from those inside blocks [C / 16, 16] and at block starts [C / 16]."""
    abar_rows = tl.reshape(abar_in * abar[:, None], [C])
    b_rows = tl.reshape(abar_in * b[:, None] + b_in * mbar[:, None], [C])
    store_coefficients(coefficients, which, factor * abar_rows, factor * b_rows, first, left, head, heads, plane, C)


@triton.jit
def store_inverse(
    inverse,
    coefficients,
    probe,
    k,
    log_alpha,
    log_mu,
    beta,
    p_factor,
    write_factor,
    x_rows,
    y_rows,
    abar,
    b,
    mbar,
    first,
    left,
    head,
    key_head,
    plane,
    key_dim,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """What the prediction errors need: p reads the states before its row, so with the decays of the row before.

    Loads the gates again: the blocks of both halves together would spill.
    """
    alpha_blocks, abar_in = earlier_decay_parts(log_alpha, first, left, head, HV, C, COMPUTE)
    log_mu_rows = load_gate(log_mu, first, left, head, HV, C, COMPUTE)
    beta_rows = tl.reshape(load_gate(beta, first, left, head, HV, C, COMPUTE), [C // 16, 16])
    gamma_blocks, b_in, _, _ = gamma_in_blocks(log_mu_rows, alpha_blocks, beta_rows, C, PRECISION, COMPUTE)
    store_reading_coefficients(
        coefficients, READ, p_factor, abar_in, b_in, abar, b, mbar, first, left, head, HV, plane, C
    )
    overlap = assemble(gamma_blocks, abar_in, b_in, x_rows, y_rows, C)
    overlap *= p_factor[:, None] * write_factor[None, :]
    overlap *= similarity(probe, k, first, left, first, left, key_head, H, key_dim, K, C, 16, PRECISION, COMPUTE)
    solved = unit_lower_inverse(overlap, C, PRECISION, COMPUTE)
    store_tile(inverse, solved, first, left, head, HV, 0, C, C, C)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
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
    beta_rows = tl.reshape(load_gate(beta, first, left, head, HV, C, COMPUTE), [C // 16, 16])
    alpha_blocks, abar_in = decay_parts(log_alpha_rows, C)
    gamma_blocks, b_in, mu_blocks, mbar_in = gamma_in_blocks(
        log_mu_rows, alpha_blocks, beta_rows, C, PRECISION, COMPUTE
    )
    x_rows, y_rows, abar, b, mbar, last_gamma, last_mu, abar_total, b_total, mbar_total = carry_over_blocks(
        gamma_blocks, mu_blocks, abar_in, b_in, mbar_in, C, COMPUTE
    )
    decay = decays + (row * HV + head) * 4
    tl.store(decay, abar_total)
    tl.store(decay + 1, b_total)
    tl.store(decay + 2, mbar_total)

    # k writes into the states.
    k_factor = inverse_norm(load_tile(k, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE)
    write_s, write_m = k_factor * last_gamma, k_factor * last_mu
    store_coefficients(coefficients, WRITE_WITHOUT_ETA, write_s, write_m, first, left, head, HV, plane, C)
    eta_rows = load_gate(eta, first, left, head, HV, C, COMPUTE)
    store_coefficients(coefficients, WRITE, eta_rows * write_s, eta_rows * write_m, first, left, head, HV, plane, C)
    write_factor = k_factor * eta_rows

    # q reads the states after its row.
    q_factor = inverse_norm(load_tile(q, first, left, key_head, H, 0, K, C, BK), L2NORM, C, COMPUTE) * scale
    store_reading_coefficients(
        coefficients, QUERY, q_factor, abar_in, b_in, abar, b, mbar, first, left, head, HV, plane, C
    )
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
        p_factor = p_factor * tl.exp(load_gate(log_alpha, first, left, head, HV, C, COMPUTE))
    store_inverse(
        inverse, coefficients, probe, k, log_alpha, log_mu, beta, p_factor, write_factor, x_rows, y_rows, abar, b, mbar,
        first, left, head, key_head, plane, key_dim, H, HV, K, C, PRECISION, COMPUTE,
    )  # fmt: skip

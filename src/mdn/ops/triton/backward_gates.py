"""Kernel: gradients of log_alpha, log_mu and beta, one program per (chunk, value head).

Reads d_gamma [tokens, HV, C], the gradient sums [5, tokens, HV] (of abar, b, the last rows of Gamma and of the mu mask,
and of alpha inside p) and the state overlaps [chunks, HV, 4] that `backward_inputs` wrote, builds the decay masks again
and goes back through Gamma = L_alpha diag(beta) L_mu, b = L_alpha (beta mbar) and the cumulative products.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import load_gate, load_tile, locate_chunk, product, store_gate


@triton.jit
def decay_mask(log_gate, C: tl.constexpr):
    """L[i, j] = product of the gates j+1..i, zero above the diagonal.

    Each column sums its own segment of logs. A difference of two cumulative sums would turn -inf into NaN and let one
    tiny gate spoil its neighbours.
    """
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C)[None, :]
    segments = tl.cumsum(tl.where(rows > columns, log_gate[:, None], 0.0), axis=0)
    return tl.where(rows >= columns, tl.exp(segments), 0.0)


@triton.jit
def decay_mask_backward(weighted, C: tl.constexpr):
    """Gradient [C] of the logs from weighted = dL * L: gate l takes part in every segment with j < l <= i."""
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C)[None, :]
    from_row_on = tl.cumsum(weighted, axis=0, reverse=True)
    return tl.sum(tl.where(columns < rows, from_row_on, 0.0), axis=1)


@triton.jit
def backward_gates_kernel(
    log_alpha,
    log_mu,
    beta,
    d_gamma,
    sums,
    overlaps,
    dlog_alpha,
    dlog_mu,
    dbeta,
    chunk_indices,
    cu_seqlens,
    time,
    plane,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1)
    first, left, row = locate_chunk(tl.program_id(0), chunk_indices, cu_seqlens, time, C, PACKED)
    at_end = tl.arange(0, C) == C - 1
    overlap = overlaps + (row * HV + head) * 4
    log_alpha_rows = load_gate(log_alpha, first, left, head, HV, C, COMPUTE)
    log_mu_rows = load_gate(log_mu, first, left, head, HV, C, COMPUTE)
    beta_rows = load_gate(beta, first, left, head, HV, C, COMPUTE)
    mbar = tl.exp(tl.cumsum(log_mu_rows, axis=0))
    d_b = load_gate(sums + plane, first, left, head, HV, C, COMPUTE) - tl.where(at_end, tl.load(overlap + 1), 0.0)
    d_gamma_tile = load_tile(d_gamma, first, left, head, HV, 0, C, C, C)
    last_gamma = load_gate(sums + 2 * plane, first, left, head, HV, C, COMPUTE)
    d_gamma_tile += tl.where(at_end[:, None], last_gamma[None, :], 0.0)

    # Through the right factor of Gamma: beta and the mu mask.
    alpha_mask = decay_mask(log_alpha_rows, C)
    through_alpha = product(tl.trans(alpha_mask), d_gamma_tile, PRECISION, COMPUTE)
    b_through_alpha = tl.sum(alpha_mask * d_b[:, None], axis=0)
    mu_mask = decay_mask(log_mu_rows, C)
    d_beta = tl.sum(through_alpha * mu_mask, axis=1) + b_through_alpha * mbar
    store_gate(dbeta, d_beta, first, left, head, HV, C)
    d_mbar = beta_rows * b_through_alpha + tl.where(at_end, tl.load(overlap + 2), 0.0)
    last_mu = load_gate(sums + 3 * plane, first, left, head, HV, C, COMPUTE)
    d_mu_mask = beta_rows[:, None] * through_alpha + tl.where(at_end[:, None], last_mu[None, :], 0.0)
    d_log_mu = decay_mask_backward(d_mu_mask * mu_mask, C) + tl.cumsum(d_mbar * mbar, axis=0, reverse=True)
    store_gate(dlog_mu, d_log_mu, first, left, head, HV, C)

    # Through the left factor: the alpha mask.
    d_alpha_mask = product(d_gamma_tile, tl.trans(beta_rows[:, None] * mu_mask), PRECISION, COMPUTE)
    d_alpha_mask += d_b[:, None] * (beta_rows * mbar)[None, :]
    abar = tl.exp(tl.cumsum(log_alpha_rows, axis=0))
    d_abar = load_gate(sums, first, left, head, HV, C, COMPUTE) + tl.where(at_end, tl.load(overlap), 0.0)
    d_log_alpha = load_gate(sums + 4 * plane, first, left, head, HV, C, COMPUTE)
    d_log_alpha += decay_mask_backward(d_alpha_mask * alpha_mask, C)
    d_log_alpha += tl.cumsum(d_abar * abar, axis=0, reverse=True)
    store_gate(dlog_alpha, d_log_alpha, first, left, head, HV, C)

"""Kernel: gradients of log_alpha, log_mu and beta, one program per (chunk, value head).

Reads d_gamma [tokens, HV, C], the gradient sums [5, tokens, HV] (of abar, b, the last rows of Gamma and of the mu mask,
and of alpha inside p) and the state overlaps [chunks, HV, 4] that `backward_inputs` wrote, builds the decay masks again
and goes back through Gamma = L_alpha diag(beta) L_mu, b = L_alpha (beta mbar) and the cumulative products.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import load_gate, load_tile, locate_chunk, store_gate
from mdn.ops.triton.decays import decay_mask, decay_mask_backward, mask_transposed_times, times_mask_transposed


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

    # Through the left factor of Gamma, the alpha mask, first: after it only one [C, C] mask has to be held at a time.
    alpha_mask, alpha_blocks, alpha_in = decay_mask(log_alpha_rows, C, COMPUTE)
    mu_mask, mu_blocks, mu_in = decay_mask(log_mu_rows, C, COMPUTE)
    d_alpha_mask = times_mask_transposed(d_gamma_tile, mu_blocks, mu_in, C, PRECISION, COMPUTE)
    d_alpha_mask = (d_alpha_mask + d_b[:, None] * mbar[None, :]) * beta_rows[None, :]
    abar = tl.exp(tl.cumsum(log_alpha_rows, axis=0))
    d_abar = load_gate(sums, first, left, head, HV, C, COMPUTE) + tl.where(at_end, tl.load(overlap), 0.0)
    d_log_alpha = load_gate(sums + 4 * plane, first, left, head, HV, C, COMPUTE)
    d_log_alpha += decay_mask_backward(d_alpha_mask * alpha_mask, C)
    d_log_alpha += tl.cumsum(d_abar * abar, axis=0, reverse=True)
    store_gate(dlog_alpha, d_log_alpha, first, left, head, HV, C)
    b_through_alpha = tl.sum(alpha_mask * d_b[:, None], axis=0)

    # Through the right factor: beta and the mu mask.
    through_alpha = mask_transposed_times(alpha_blocks, alpha_in, d_gamma_tile, C, PRECISION, COMPUTE)
    d_beta = tl.sum(through_alpha * mu_mask, axis=1) + b_through_alpha * mbar
    store_gate(dbeta, d_beta, first, left, head, HV, C)
    d_mbar = beta_rows * b_through_alpha + tl.where(at_end, tl.load(overlap + 2), 0.0)
    last_mu = load_gate(sums + 3 * plane, first, left, head, HV, C, COMPUTE)
    d_mu_mask = beta_rows[:, None] * through_alpha + tl.where(at_end[:, None], last_mu[None, :], 0.0)
    d_log_mu = decay_mask_backward(d_mu_mask * mu_mask, C) + tl.cumsum(d_mbar * mbar, axis=0, reverse=True)
    store_gate(dlog_mu, d_log_mu, first, left, head, HV, C)

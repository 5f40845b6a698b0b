"""Kernel: gradients of log_alpha, log_mu and beta, one program per (chunk, value head).

Reads d_gamma [tokens, HV, C], the gradient sums [7, tokens, HV] (of abar, b, the last rows of Gamma and of the mu mask,
and of alpha inside p) and the state overlaps [chunks, HV, 4] that `backward_inputs` wrote, builds the decay masks again
and goes back through Gamma = L_alpha diag(beta) L_mu, b = L_alpha (beta mbar) and the cumulative products.
First all of alpha, then all of mu and beta; the second half loads its inputs again, because [C, C] matrices held from
one half to the other would spill.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import (
    ABAR_IN_ERRORS,
    ABAR_IN_OUTPUTS,
    ALPHA_IN_ERRORS,
    B_IN_ERRORS,
    B_IN_OUTPUTS,
    LAST_GAMMA_IN_STATES,
    LAST_MU_IN_STATES,
    RUNTIME_NUMBERS,
    load_gate,
    load_tile,
    locate_chunk,
    stacked,
    store_gate,
)
from mdn.ops.triton.decays import (
    decay_mask,
    decay_mask_backward,
    decay_parts,
    mask_transposed_times,
    times_mask_transposed,
)


@triton.jit
def load_gamma_gradient(
    d_gamma, sums, first, left, head, plane, HV: tl.constexpr, C: tl.constexpr, COMPUTE: tl.constexpr
):
    """The whole gradient of Gamma [C, C]: what `backward_scores` found, and in the last row the states' part."""
    at_end = tl.arange(0, C) == C - 1
    of_states = load_gate(stacked(sums, LAST_GAMMA_IN_STATES, plane), first, left, head, HV, C, COMPUTE)
    return load_tile(d_gamma, first, left, head, HV, 0, C, C, C) + tl.where(at_end[:, None], of_states[None, :], 0.0)


@triton.jit
def alpha_gradient(
    log_alpha,
    log_mu,
    beta,
    d_gamma,
    sums,
    overlap,
    dlog_alpha,
    first,
    left,
    head,
    plane,
    HV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Stores the gradient of log_alpha; returns L_alpha^T db [C], the gradient of beta mbar."""
    at_end = tl.arange(0, C) == C - 1
    # The error of token t + 1 reads the states with abar and b of token t; the next chunk's tokens do not count here.
    left_ahead = tl.minimum(left, C) - 1
    log_mu_rows = load_gate(log_mu, first, left, head, HV, C, COMPUTE)
    mu_blocks, mu_in = decay_parts(log_mu_rows, C)
    d_gamma_tile = load_gamma_gradient(d_gamma, sums, first, left, head, plane, HV, C, COMPUTE)
    d_alpha_mask = times_mask_transposed(d_gamma_tile, mu_blocks, mu_in, C, PRECISION, COMPUTE)
    d_b = load_gate(stacked(sums, B_IN_OUTPUTS, plane), first, left, head, HV, C, COMPUTE)
    d_b += load_gate(stacked(sums, B_IN_ERRORS, plane), first + 1, left_ahead, head, HV, C, COMPUTE)
    d_b -= tl.where(at_end, tl.load(overlap + 1), 0.0)
    mbar = tl.exp(tl.cumsum(log_mu_rows, axis=0))
    beta_rows = load_gate(beta, first, left, head, HV, C, COMPUTE)
    d_alpha_mask = (d_alpha_mask + d_b[:, None] * mbar[None, :]) * beta_rows[None, :]

    log_alpha_rows = load_gate(log_alpha, first, left, head, HV, C, COMPUTE)
    alpha_mask = decay_mask(log_alpha_rows, C, COMPUTE)
    abar = tl.exp(tl.cumsum(log_alpha_rows, axis=0))
    d_abar = load_gate(stacked(sums, ABAR_IN_OUTPUTS, plane), first, left, head, HV, C, COMPUTE)
    d_abar += load_gate(stacked(sums, ABAR_IN_ERRORS, plane), first + 1, left_ahead, head, HV, C, COMPUTE)
    d_abar += tl.where(at_end, tl.load(overlap), 0.0)
    gradient = load_gate(stacked(sums, ALPHA_IN_ERRORS, plane), first, left, head, HV, C, COMPUTE)
    gradient += decay_mask_backward(d_alpha_mask * alpha_mask, C)
    gradient += tl.cumsum(d_abar * abar, axis=0, reverse=True)
    store_gate(dlog_alpha, gradient, first, left, head, HV, C)
    return tl.sum(alpha_mask * d_b[:, None], axis=0)


@triton.jit
def mu_and_beta_gradients(
    log_alpha,
    log_mu,
    beta,
    d_gamma,
    sums,
    overlap,
    d_beta_mbar,
    dlog_mu,
    dbeta,
    first,
    left,
    head,
    plane,
    HV: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Stores the gradients of log_mu and beta, the right factors of Gamma."""
    at_end = tl.arange(0, C) == C - 1
    alpha_blocks, alpha_in = decay_parts(load_gate(log_alpha, first, left, head, HV, C, COMPUTE), C)
    d_gamma_tile = load_gamma_gradient(d_gamma, sums, first, left, head, plane, HV, C, COMPUTE)
    through_alpha = mask_transposed_times(alpha_blocks, alpha_in, d_gamma_tile, C, PRECISION, COMPUTE)

    log_mu_rows = load_gate(log_mu, first, left, head, HV, C, COMPUTE)
    mbar = tl.exp(tl.cumsum(log_mu_rows, axis=0))
    mu_mask = decay_mask(log_mu_rows, C, COMPUTE)
    d_beta = tl.sum(through_alpha * mu_mask, axis=1) + d_beta_mbar * mbar
    store_gate(dbeta, d_beta, first, left, head, HV, C)
    beta_rows = load_gate(beta, first, left, head, HV, C, COMPUTE)
    d_mbar = beta_rows * d_beta_mbar + tl.where(at_end, tl.load(overlap + 2), 0.0)
    of_states = load_gate(stacked(sums, LAST_MU_IN_STATES, plane), first, left, head, HV, C, COMPUTE)
    d_mu_mask = beta_rows[:, None] * through_alpha + tl.where(at_end[:, None], of_states[None, :], 0.0)
    gradient = decay_mask_backward(d_mu_mask * mu_mask, C) + tl.cumsum(d_mbar * mbar, axis=0, reverse=True)
    store_gate(dlog_mu, gradient, first, left, head, HV, C)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
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
    HV: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1)
    first, left, row = locate_chunk(tl.program_id(0), chunk_indices, cu_seqlens, time, C, PACKED)
    overlap = overlaps + (row * HV + head) * 4
    d_beta_mbar = alpha_gradient(
        log_alpha, log_mu, beta, d_gamma, sums, overlap, dlog_alpha, first, left, head, plane, HV, C, PRECISION, COMPUTE
    )
    mu_and_beta_gradients(
        log_alpha, log_mu, beta, d_gamma, sums, overlap, d_beta_mbar, dlog_mu, dbeta, first, left, head, plane, HV, C,
        PRECISION, COMPUTE,
    )  # fmt: skip

"""Kernel: gradients of q, k, p and of the four gates, one program per (chunk, key head), all chunks at once.

A program walks over the value heads of its key head and sums their gradients of q, k and p in registers, so that
grouped heads need no extra buffer. Per value head, with S, M before the chunk, dS, dM after it, E the gradient of v:
    d scores = do R^T,  d overlap = -E R^T                           [C, C], summed over V
    do S^T, do M^T (for q);  E S^T, E M^T (for p);  R dS^T, R dM^T (for k)    [C, K], summed over V
and from their row sums and the [C, C] matrices the gradients of Gamma, b, abar, mbar and of the logs behind them.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import (
    decay_mask_backward,
    following,
    inverse_norm,
    last_row,
    load_gate,
    load_tile,
    locate_chunk,
    norm_backward,
    previous,
    product,
    row_shift,
    state_offsets,
    store_gate,
    store_tile,
)
from mdn.ops.triton.prepare import coupled_decays


@triton.jit
def similarity_over_values(
    x,
    y,
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
    """x y^T [C, C] of two [tokens, HV, V] tensors."""
    total = tl.zeros([C, C], COMPUTE)
    for column in range(0, V, BV):
        x_tile = load_tile(x, first, left, head, HV, column, V, C, BV)
        y_tile = load_tile(y, first, left, head, HV, column, V, C, BV)
        total = tl.dot(x_tile, tl.trans(y_tile), acc=total, input_precision=PRECISION, out_dtype=COMPUTE)
    return total


@triton.jit
def read_state(
    x,
    state,
    first,
    left,
    head,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """x state^T [C, K] of a [tokens, HV, V] tensor and one [K, V] state."""
    total = tl.zeros([C, BK], COMPUTE)
    for column in range(0, V, BV):
        x_tile = load_tile(x, first, left, head, HV, column, V, C, BV)
        offsets, mask = state_offsets(column, K, V, BK, BV)
        state_tile = tl.load(state + offsets, mask=mask, other=0.0)
        total = tl.dot(x_tile, tl.trans(state_tile), acc=total, input_precision=PRECISION, out_dtype=COMPUTE)
    return total


@triton.jit
def state_overlaps(
    states,
    gradients,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """<dS, S>, <dS, M> and <dM, M>: the gradients of abar, -b and mbar of the whole chunk."""
    ss = tl.zeros([BK], COMPUTE)
    sm = tl.zeros([BK], COMPUTE)
    mm = tl.zeros([BK], COMPUTE)
    for column in range(0, V, BV):
        offsets, mask = state_offsets(column, K, V, BK, BV)
        m = tl.load(states + K * V + offsets, mask=mask, other=0.0).to(COMPUTE)
        ds = tl.load(gradients + offsets, mask=mask, other=0.0).to(COMPUTE)
        sm += tl.sum(ds * m, axis=1)
        ss += tl.sum(ds * tl.load(states + offsets, mask=mask, other=0.0).to(COMPUTE), axis=1)
        mm += tl.sum(m * tl.load(gradients + K * V + offsets, mask=mask, other=0.0).to(COMPUTE), axis=1)
    return tl.sum(ss, axis=0), tl.sum(sm, axis=0), tl.sum(mm, axis=0)


@triton.jit
def gate_gradients(
    alpha_mask,
    mu_mask,
    beta,
    abar,
    mbar,
    d_gamma,
    d_last_mu,
    d_abar,
    d_b,
    d_mbar,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Gradients of log_alpha, log_mu and beta through Gamma, b, abar, mbar and the last row of the mu mask."""
    rows = tl.arange(0, C)
    through_alpha = product(tl.trans(alpha_mask), d_gamma, PRECISION, COMPUTE)
    b_through_alpha = tl.sum(alpha_mask * d_b[:, None], axis=0)
    d_beta = tl.sum(through_alpha * mu_mask, axis=1) + b_through_alpha * mbar
    d_mbar += beta * b_through_alpha

    last = tl.where(rows[:, None] == C - 1, d_last_mu[None, :], 0.0)
    d_log_mu = decay_mask_backward((beta[:, None] * through_alpha + last) * mu_mask, C)
    d_log_mu += tl.cumsum(d_mbar * mbar, axis=0, reverse=True)

    d_alpha_mask = product(d_gamma, tl.trans(beta[:, None] * mu_mask), PRECISION, COMPUTE)
    d_alpha_mask += d_b[:, None] * (beta * mbar)[None, :]
    d_log_alpha = decay_mask_backward(d_alpha_mask * alpha_mask, C)
    d_log_alpha += tl.cumsum(d_abar * abar, axis=0, reverse=True)
    return d_log_alpha, d_log_mu, d_beta


@triton.jit
def backward_inputs_kernel(
    grad_o,
    q,
    k,
    p,
    log_alpha,
    log_mu,
    beta,
    eta,
    residual,
    dv,
    states,
    state_gradients,
    dq,
    dk,
    dp,
    dlog_alpha,
    dlog_mu,
    dbeta,
    deta,
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
    key_head = tl.program_id(1)
    first, left, row = locate_chunk(tl.program_id(0), chunk_indices, cu_seqlens, time, C, PACKED)
    dtype: tl.constexpr = q.dtype.element_ty
    rows = tl.arange(0, C)
    lower = rows[:, None] >= rows[None, :]

    q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
    k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
    q_factor = inverse_norm(q_tile, L2NORM, C, COMPUTE)
    k_factor = inverse_norm(k_tile, L2NORM, C, COMPUTE)
    if p is None:
        p_tile = k_tile
        p_norm = k_factor
    else:
        p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)
        p_norm = inverse_norm(p_tile, L2NORM, C, COMPUTE)
    q_gradient = tl.zeros([C, BK], COMPUTE)
    k_gradient = tl.zeros([C, BK], COMPUTE)
    p_gradient = tl.zeros([C, BK], COMPUTE)

    for member in range(HV // H):
        head = key_head * (HV // H) + member
        log_alpha_rows = load_gate(log_alpha, first, left, head, HV, C, COMPUTE)
        log_mu_rows = load_gate(log_mu, first, left, head, HV, C, COMPUTE)
        beta_rows = load_gate(beta, first, left, head, HV, C, COMPUTE)
        eta_rows = load_gate(eta, first, left, head, HV, C, COMPUTE)
        alpha_mask, mu_mask, gamma, abar, mbar, b = coupled_decays(
            log_alpha_rows, log_mu_rows, beta_rows, C, PRECISION, COMPUTE
        )
        if P_TIMES_ALPHA:
            p_scale = tl.exp(log_alpha_rows)
        else:
            p_scale = tl.full([C], 1.0, COMPUTE)
        p_factor = p_norm * p_scale

        # The [C, C] part: gradients of the scores, of the overlaps and of Gamma. Eta stays outside the weights, so
        # that its own gradient needs no division (it may be zero).
        d_scores = similarity_over_values(grad_o, residual, first, left, head, HV, V, C, BV, PRECISION, COMPUTE)
        d_scores *= (q_factor * scale)[:, None] * k_factor[None, :]
        d_gamma = d_scores * eta_rows[None, :] * product(q_tile, tl.trans(k_tile), PRECISION, COMPUTE)
        q_weights = d_scores * gamma

        d_overlap = similarity_over_values(dv, residual, first, left, head, HV, V, C, BV, PRECISION, COMPUTE)
        d_overlap *= -p_factor[:, None] * k_factor[None, :]
        d_gamma_prev = d_overlap * eta_rows[None, :] * product(p_tile, tl.trans(k_tile), PRECISION, COMPUTE)
        shift = row_shift(C, COMPUTE)
        d_gamma = tl.where(lower, d_gamma + product(tl.trans(shift), d_gamma_prev, PRECISION, COMPUTE), 0.0)
        p_weights = d_overlap * product(shift, gamma, PRECISION, COMPUTE)

        # q: through the scores and through the states.
        s_state = states + (row * HV + head) * (2 * K * V)
        m_state = s_state + K * V
        through = read_state(grad_o, s_state, first, left, head, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
        query = q_factor * scale
        d_abar = query * tl.sum(through * q_tile, axis=1)
        q_gradient += (query * abar)[:, None] * through
        through = read_state(grad_o, m_state, first, left, head, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
        d_b = -query * tl.sum(through * q_tile, axis=1)
        q_gradient -= (query * b)[:, None] * through
        q_gradient += product((q_weights * eta_rows[None, :]).to(dtype), k_tile, PRECISION, COMPUTE)

        # p: the same through the prediction errors, one row earlier.
        through = read_state(dv, s_state, first, left, head, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
        d_abar -= following(p_factor * tl.sum(through * p_tile, axis=1), C)
        p_part = -(p_factor * previous(abar, 1.0, C))[:, None] * through
        through = read_state(dv, m_state, first, left, head, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
        d_b += following(p_factor * tl.sum(through * p_tile, axis=1), C)
        p_part += (p_factor * previous(b, 0.0, C))[:, None] * through
        p_part += product((p_weights * eta_rows[None, :]).to(dtype), k_tile, PRECISION, COMPUTE)
        if P_TIMES_ALPHA:
            d_log_alpha = tl.sum(p_part * p_tile, axis=1)
        else:
            d_log_alpha = tl.zeros([C], COMPUTE)
        if p is None:
            k_gradient += p_part
        else:
            p_gradient += p_part

        # k: through scores, overlaps and the states after the chunk.
        s_gradient = state_gradients + (row * HV + head) * (2 * K * V)
        m_gradient = s_gradient + K * V
        through = read_state(residual, s_gradient, first, left, head, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
        d_last_gamma = k_factor * eta_rows * tl.sum(through * k_tile, axis=1)
        k_part = (k_factor * last_row(gamma, C))[:, None] * through
        through = read_state(residual, m_gradient, first, left, head, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
        d_last_mu = -k_factor * eta_rows * tl.sum(through * k_tile, axis=1)
        k_part -= (k_factor * last_row(mu_mask, C))[:, None] * through
        k_part += product(tl.trans(q_weights.to(dtype)), q_tile, PRECISION, COMPUTE)
        k_part += product(tl.trans(p_weights.to(dtype)), p_tile, PRECISION, COMPUTE)
        store_gate(deta, tl.sum(k_part * k_tile, axis=1), first, left, head, HV, C)
        k_gradient += eta_rows[:, None] * k_part

        ss, sm, mm = state_overlaps(s_state, s_gradient, K, V, BK, BV, COMPUTE)
        at_end = rows == C - 1
        d_gamma += tl.where(at_end[:, None], d_last_gamma[None, :], 0.0)
        d_abar += tl.where(at_end, ss, 0.0)
        d_b -= tl.where(at_end, sm, 0.0)
        d_mbar = tl.where(at_end, mm, 0.0)
        through_masks, d_log_mu, d_beta = gate_gradients(
            alpha_mask, mu_mask, beta_rows, abar, mbar, d_gamma, d_last_mu, d_abar, d_b, d_mbar, C, PRECISION, COMPUTE
        )
        store_gate(dlog_alpha, d_log_alpha + through_masks, first, left, head, HV, C)
        store_gate(dlog_mu, d_log_mu, first, left, head, HV, C)
        store_gate(dbeta, d_beta, first, left, head, HV, C)

    store_tile(dq, norm_backward(q_gradient, q_tile, q_factor, L2NORM), first, left, key_head, H, 0, K, C, BK)
    store_tile(dk, norm_backward(k_gradient, k_tile, k_factor, L2NORM), first, left, key_head, H, 0, K, C, BK)
    if dp is not None:
        store_tile(dp, norm_backward(p_gradient, p_tile, p_norm, L2NORM), first, left, key_head, H, 0, K, C, BK)

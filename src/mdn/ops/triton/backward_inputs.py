"""Kernel: gradients of q, k, p and eta, one program per (chunk, key head), all chunks at once.

A program walks over the value heads of its key head and sums their gradients of k and p, then those of q, in
registers, so that grouped heads need no extra buffer. Per value head, with S, M before the chunk, dS, dM after it and E
the gradient of v:
    do S^T, do M^T (for q);  E S^T, E M^T (for p);  R dS^T, R dM^T (for k)     [C, K], summed over V
    q_weights k, p_weights k, q_weights^T q, p_weights^T p                      from `backward_scores`
The row sums of the first six with q, p and k are gradients of abar, b and of the last rows of Gamma and the mu mask:
they go to `backward_gates` as sums [7, tokens, HV], with <dS, S>, <dS, M>, <dM, M> as overlaps [chunks, HV, 4].
Loops over V end at ``value_dim``, a number equal to V: the compiler would unroll a constant loop, and spill.
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
    QUERY,
    READ,
    RUNTIME_NUMBERS,
    WRITE_WITHOUT_ETA,
    add_product,
    inverse_norm,
    load_coefficients,
    load_gate,
    load_tile,
    locate_chunk,
    stacked,
    state_offsets,
    store_gate,
    store_tile,
)


@triton.jit
def read_state(
    x,
    state,
    first,
    left,
    head,
    value_dim,
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
    for column in range(0, value_dim, BV):
        x_tile = load_tile(x, first, left, head, HV, column, V, C, BV)
        offsets, mask = state_offsets(column, K, V, BK, BV)
        state_tile = tl.load(state + offsets, mask=mask, other=0.0)
        total = add_product(total, x_tile, tl.trans(state_tile), PRECISION, COMPUTE)
    return total


@triton.jit
def store_overlaps(
    overlap,
    states,
    gradients,
    value_dim,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Stores <dS, S>, <dS, M> and <dM, M>: the gradients of abar, -b and mbar of the whole chunk."""
    ss = tl.zeros([BK], COMPUTE)
    sm = tl.zeros([BK], COMPUTE)
    mm = tl.zeros([BK], COMPUTE)
    for column in range(0, value_dim, BV):
        offsets, mask = state_offsets(column, K, V, BK, BV)
        m = tl.load(states + K * V + offsets, mask=mask, other=0.0).to(COMPUTE)
        ds = tl.load(gradients + offsets, mask=mask, other=0.0).to(COMPUTE)
        sm += tl.sum(ds * m, axis=1)
        ss += tl.sum(ds * tl.load(states + offsets, mask=mask, other=0.0).to(COMPUTE), axis=1)
        mm += tl.sum(m * tl.load(gradients + K * V + offsets, mask=mask, other=0.0).to(COMPUTE), axis=1)
    tl.store(overlap, tl.sum(ss, axis=0))
    tl.store(overlap + 1, tl.sum(sm, axis=0))
    tl.store(overlap + 2, tl.sum(mm, axis=0))


@triton.jit
def add_weighted_rows(
    total,
    weights,
    rows,
    eta,
    first,
    left,
    head,
    HV: tl.constexpr,
    key_head,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """total + weights diag(eta) rows, or total + weights^T rows; 16 tokens at a time to keep operands small."""
    for token in range(0, tl.minimum(left, C), 16):
        row_tile = load_tile(rows, first + token, left - token, key_head, H, 0, K, 16, BK)
        if TRANSPOSED:
            tile = load_tile(weights, first + token, left - token, head, HV, 0, C, 16, C)
            total = add_product(total, tl.trans(tile), row_tile, PRECISION, COMPUTE)
        else:
            tile = load_tile(weights, first, left, head, HV, token, C, C, 16)
            factor = load_gate(eta, first + token, left - token, head, HV, 16, COMPUTE)
            tile = (tile * factor[None, :]).to(row_tile.dtype)
            total = add_product(total, tile, row_tile, PRECISION, COMPUTE)
    return total


@triton.jit
def add_through_states(
    total,
    x,
    state,
    tile,
    of_s,
    of_m,
    first,
    left,
    head,
    value_dim,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """total + diag(of_s) x S^T - diag(of_m) x M^T [C, K], and the row sums of x S^T and of x M^T with ``tile`` [C].

    One after the other: x S^T and x M^T are never held together.
    """
    through = read_state(x, state, first, left, head, value_dim, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
    with_s = tl.sum(through * tile, axis=1)
    total += of_s[:, None] * through
    through = read_state(x, state + K * V, first, left, head, value_dim, HV, K, V, C, BK, BV, PRECISION, COMPUTE)
    with_m = tl.sum(through * tile, axis=1)
    total -= of_m[:, None] * through
    return total, with_s, with_m


@triton.jit
def probe_gradient(
    probe,
    k,
    log_alpha,
    eta,
    dv,
    coefficients,
    state,
    p_weights,
    sums,
    first,
    left,
    head,
    key_head,
    plane,
    value_dim,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    P_TIMES_ALPHA: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Through the prediction errors: the gradient of p [C, K]."""
    p_tile = load_tile(probe, first, left, key_head, H, 0, K, C, BK)
    p_factor = inverse_norm(p_tile, L2NORM, C, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor = p_factor * tl.exp(load_gate(log_alpha, first, left, head, HV, C, COMPUTE))
    of_s, of_m = load_coefficients(coefficients, READ, first, left, head, HV, plane, C, COMPUTE)
    part = tl.zeros([C, BK], COMPUTE)
    part, with_s, with_m = add_through_states(
        part, dv, state, p_tile, -of_s, -of_m, first, left, head, value_dim, HV, K, V, C, BK, BV, PRECISION, COMPUTE
    )
    store_gate(stacked(sums, ABAR_IN_ERRORS, plane), -p_factor * with_s, first, left, head, HV, C)
    store_gate(stacked(sums, B_IN_ERRORS, plane), p_factor * with_m, first, left, head, HV, C)
    part = add_weighted_rows(
        part, p_weights, k, eta, first, left, head, HV, key_head, H, K, C, BK, False, PRECISION, COMPUTE
    )
    if P_TIMES_ALPHA:
        d_log_alpha = tl.sum(part * p_tile, axis=1)
    else:
        d_log_alpha = tl.zeros([C], COMPUTE)
    store_gate(stacked(sums, ALPHA_IN_ERRORS, plane), d_log_alpha, first, left, head, HV, C)
    return part


@triton.jit
def key_gradient(
    q,
    k,
    probe,
    eta,
    residual,
    coefficients,
    state_gradient,
    q_weights,
    p_weights,
    deta,
    sums,
    first,
    left,
    head,
    key_head,
    plane,
    value_dim,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Through the states after the chunk and both [C, C] matrices: the gradient of k [C, K]; stores that of eta."""
    eta_rows = load_gate(eta, first, left, head, HV, C, COMPUTE)
    k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
    of_s, of_m = load_coefficients(coefficients, WRITE_WITHOUT_ETA, first, left, head, HV, plane, C, COMPUTE)
    part = tl.zeros([C, BK], COMPUTE)
    part, with_s, with_m = add_through_states(
        part, residual, state_gradient, k_tile, of_s, of_m, first, left, head, value_dim, HV, K, V, C, BK, BV,
        PRECISION, COMPUTE,
    )  # fmt: skip
    factor = inverse_norm(k_tile, L2NORM, C, COMPUTE) * eta_rows
    store_gate(stacked(sums, LAST_GAMMA_IN_STATES, plane), factor * with_s, first, left, head, HV, C)
    store_gate(stacked(sums, LAST_MU_IN_STATES, plane), -factor * with_m, first, left, head, HV, C)
    part = add_weighted_rows(
        part, q_weights, q, eta, first, left, head, HV, key_head, H, K, C, BK, True, PRECISION, COMPUTE
    )
    part = add_weighted_rows(
        part, p_weights, probe, eta, first, left, head, HV, key_head, H, K, C, BK, True, PRECISION, COMPUTE
    )
    store_gate(deta, tl.sum(part * k_tile, axis=1), first, left, head, HV, C)
    return eta_rows[:, None] * part


@triton.jit
def add_query_gradient(
    total,
    q,
    k,
    eta,
    grad_o,
    coefficients,
    state,
    q_weights,
    sums,
    scale,
    first,
    left,
    head,
    key_head,
    plane,
    value_dim,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Through the outputs: total + the gradient of q [C, K]."""
    q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
    q_factor = inverse_norm(q_tile, L2NORM, C, COMPUTE) * scale
    of_s, of_m = load_coefficients(coefficients, QUERY, first, left, head, HV, plane, C, COMPUTE)
    total, with_s, with_m = add_through_states(
        total, grad_o, state, q_tile, of_s, of_m, first, left, head, value_dim, HV, K, V, C, BK, BV, PRECISION, COMPUTE
    )
    store_gate(stacked(sums, ABAR_IN_OUTPUTS, plane), q_factor * with_s, first, left, head, HV, C)
    store_gate(stacked(sums, B_IN_OUTPUTS, plane), -q_factor * with_m, first, left, head, HV, C)
    return add_weighted_rows(
        total, q_weights, k, eta, first, left, head, HV, key_head, H, K, C, BK, False, PRECISION, COMPUTE
    )


@triton.jit
def store_raw_gradient(
    output,
    rows,
    gradient,
    first,
    left,
    head,
    heads,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Store the gradient of rows as they were given, from ``factor`` times that of the normalised rows."""
    if L2NORM:
        tile = load_tile(rows, first, left, head, heads, 0, K, C, BK)
        normalised = inverse_norm(tile, L2NORM, C, COMPUTE)[:, None] * tile
        gradient -= normalised * tl.sum(gradient * normalised, axis=1)[:, None]
    store_tile(output, gradient, first, left, head, heads, 0, K, C, BK)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def backward_inputs_kernel(
    grad_o,
    q,
    k,
    p,
    log_alpha,
    eta,
    residual,
    dv,
    coefficients,
    states,
    state_gradients,
    q_weights,
    p_weights,
    dq,
    dk,
    dp,
    deta,
    sums,
    overlaps,
    chunk_indices,
    cu_seqlens,
    time,
    plane,
    value_dim,
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
    if p is None:
        probe = k
    else:
        probe = p
    # Each is the normalising factor times the gradient of the normalised rows, summed over the value heads.
    k_gradient = tl.zeros([C, BK], COMPUTE)
    p_gradient = tl.zeros([C, BK], COMPUTE)
    # Tiles of q, k and p are loaded again where they are used: held all along, they and the sums would spill.
    for member in range(HV // H):
        head = key_head * (HV // H) + member
        state = states + (row * HV + head) * (2 * K * V)
        state_gradient = state_gradients + (row * HV + head) * (2 * K * V)
        store_overlaps(overlaps + (row * HV + head) * 4, state, state_gradient, value_dim, K, V, BK, BV, COMPUTE)
        k_gradient += key_gradient(
            q, k, probe, eta, residual, coefficients, state_gradient, q_weights, p_weights, deta, sums, first, left,
            head, key_head, plane, value_dim, H, HV, K, V, C, BK, BV, L2NORM, PRECISION, COMPUTE,
        )  # fmt: skip
        part = probe_gradient(
            probe, k, log_alpha, eta, dv, coefficients, state, p_weights, sums, first, left, head, key_head, plane,
            value_dim, H, HV, K, V, C, BK, BV, L2NORM, P_TIMES_ALPHA, PRECISION, COMPUTE,
        )  # fmt: skip
        if p is None:
            k_gradient += part
        else:
            p_gradient += part
    store_raw_gradient(dk, k, k_gradient, first, left, key_head, H, K, C, BK, L2NORM, COMPUTE)
    if dp is not None:
        store_raw_gradient(dp, p, p_gradient, first, left, key_head, H, K, C, BK, L2NORM, COMPUTE)

    # q in a second round, when the other gradients have left the registers.
    q_gradient = tl.zeros([C, BK], COMPUTE)
    for member in range(HV // H):
        head = key_head * (HV // H) + member
        state = states + (row * HV + head) * (2 * K * V)
        q_gradient = add_query_gradient(
            q_gradient, q, k, eta, grad_o, coefficients, state, q_weights, sums, scale, first, left, head, key_head,
            plane, value_dim, H, HV, K, V, C, BK, BV, L2NORM, PRECISION, COMPUTE,
        )  # fmt: skip
    store_raw_gradient(dq, q, q_gradient, first, left, key_head, H, K, C, BK, L2NORM, COMPUTE)

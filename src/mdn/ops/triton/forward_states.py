"""Kernel: the chunks of a sequence in order, one program per (sequence, value head, tile of V columns).

Keeps S and M [K, BV] in registers and writes the outputs o and the corrected values R, both [tokens, HV, V]:
    R  = inverse (v - read_s p S + read_m p M)
    o  = query_s q S - query_m q M + scores R
    S' = abar S - b M + k^T (write_s R),   M' = mbar M - k^T (write_m R)
The chunk-start states are not written: the backward pass rebuilds them from R.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import (
    add_product,
    load_coefficients,
    load_tile,
    locate_sequence,
    product,
    state_offsets,
    state_row,
    store_tile,
    tokens_left_at,
)


@triton.jit
def load_states(states, sequence, sequences, head, first_column, HV, K, V, BK, BV, COMPUTE: tl.constexpr):
    """S and M tiles of a stacked [2, N, HV, K, V] state, or zeros when there is none."""
    if states is None:
        return tl.zeros([BK, BV], COMPUTE), tl.zeros([BK, BV], COMPUTE)
    else:
        offsets, mask = state_offsets(first_column, K, V, BK, BV)
        base = states + (sequence * HV + head).to(tl.int64) * (K * V)
        momentum = base + sequences.to(tl.int64) * (HV * K * V)
        s = tl.load(base + offsets, mask=mask, other=0.0).to(COMPUTE)
        return s, tl.load(momentum + offsets, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def store_states(states, s, m, sequence, sequences, head, first_column, HV, K, V, BK, BV):
    if states is not None:
        offsets, mask = state_offsets(first_column, K, V, BK, BV)
        base = states + (sequence * HV + head).to(tl.int64) * (K * V)
        momentum = base + sequences.to(tl.int64) * (HV * K * V)
        tl.store(base + offsets, s.to(states.dtype.element_ty), mask=mask)
        tl.store(momentum + offsets, m.to(states.dtype.element_ty), mask=mask)


@triton.jit
def advance_states(s, m, k_tile, r_tile, write_s, write_m, decay, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """The states after a chunk from those before it and its R (already rounded to the operand dtype)."""
    dtype: tl.constexpr = k_tile.dtype
    keys = tl.trans(k_tile)
    wide = r_tile.to(COMPUTE)
    s = tl.load(decay) * s - tl.load(decay + 1) * m
    m = tl.load(decay + 2) * m
    s = add_product(s, keys, (write_s[:, None] * wide).to(dtype), PRECISION, COMPUTE)
    return s, add_product(m, keys, (-write_m[:, None] * wide).to(dtype), PRECISION, COMPUTE)


@triton.jit
def forward_states_kernel(
    q,
    k,
    p,
    v,
    inverse,
    scores,
    coefficients,
    decays,
    initial_state,
    o,
    residual,
    final_state,
    cu_seqlens,
    time,
    sequences,
    plane,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    sequence = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    key_head = head // (HV // H)
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = v.dtype.element_ty
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    s, m = load_states(initial_state, sequence, sequences, head, column, HV, K, V, BK, BV, COMPUTE)

    for chunk in range(tl.cdiv(length, C)):
        first = begin + chunk * C
        left = tokens_left_at(length, chunk, C)
        q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
        k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
        if p is None:
            p_tile = k_tile
        else:
            p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)
        query_s, query_m = load_coefficients(coefficients, 1, first, left, head, HV, plane, C, COMPUTE)
        read_s, read_m = load_coefficients(coefficients, 0, first, left, head, HV, plane, C, COMPUTE)
        error = load_tile(v, first, left, head, HV, column, V, C, BV).to(COMPUTE)
        # All products with S before those with M: only one of them is held as an operand.
        operand = s.to(dtype)
        out = query_s[:, None] * product(q_tile, operand, PRECISION, COMPUTE)
        error -= read_s[:, None] * product(p_tile, operand, PRECISION, COMPUTE)
        operand = m.to(dtype)
        out -= query_m[:, None] * product(q_tile, operand, PRECISION, COMPUTE)
        error += read_m[:, None] * product(p_tile, operand, PRECISION, COMPUTE)
        inverse_tile = load_tile(inverse, first, left, head, HV, 0, C, C, C)
        r_tile = product(inverse_tile, error, SOLVE_PRECISION, COMPUTE).to(dtype)
        if residual is not None:
            store_tile(residual, r_tile, first, left, head, HV, column, V, C, BV)

        scores_tile = load_tile(scores, first, left, head, HV, 0, C, C, C)
        out = add_product(out, scores_tile, r_tile, PRECISION, COMPUTE)
        store_tile(o, out, first, left, head, HV, column, V, C, BV)

        write_s, write_m = load_coefficients(coefficients, 2, first, left, head, HV, plane, C, COMPUTE)
        decay = decays + (state_row(begin, sequence, chunk, C) * HV + head) * 4
        s, m = advance_states(s, m, k_tile, r_tile, write_s, write_m, decay, PRECISION, COMPUTE)

    store_states(final_state, s, m, sequence, sequences, head, column, HV, K, V, BK, BV)

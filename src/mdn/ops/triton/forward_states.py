"""Kernel: the chunks of a sequence in order, one program per (sequence, value head, tile of V columns).

Keeps S and M [K, BV] in registers and writes the outputs o and the corrected values R, both [tokens, HV, V]:
    R  = inverse (v - read_s p S + read_m p M)
    o  = query_s q S - query_m q M + scores R
    S' = abar S - b M + k^T (write_s R),   M' = mbar M - k^T (write_m R)
The chunk-start states are not written: the backward pass rebuilds them from R.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import load_gate, load_tile, locate_sequence, product, state_offsets, state_row, store_tile


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
def load_coefficients(coefficients, which, first, left, head, heads, plane, C: tl.constexpr, COMPUTE: tl.constexpr):
    """The pair of [C] vectors that multiply products with S and with M; which: 0 read, 1 query, 2 write."""
    pair = coefficients + 2 * which * plane
    of_s = load_gate(pair, first, left, head, heads, C, COMPUTE)
    return of_s, load_gate(pair + plane, first, left, head, heads, C, COMPUTE)


@triton.jit
def advance_states(s, m, k_tile, r_tile, write_s, write_m, decay, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """The states after a chunk from those before it and its R (already rounded to the operand dtype)."""
    dtype: tl.constexpr = k_tile.dtype
    keys = tl.trans(k_tile)
    wide = r_tile.to(COMPUTE)
    into_s = product(keys, (write_s[:, None] * wide).to(dtype), PRECISION, COMPUTE)
    into_m = product(keys, (write_m[:, None] * wide).to(dtype), PRECISION, COMPUTE)
    s = tl.load(decay) * s - tl.load(decay + 1) * m + into_s
    return s, tl.load(decay + 2) * m - into_m


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
        left = length - chunk * C
        s_operand = s.to(dtype)
        m_operand = m.to(dtype)
        k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
        if p is None:
            p_tile = k_tile
        else:
            p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)

        of_s, of_m = load_coefficients(coefficients, 0, first, left, head, HV, plane, C, COMPUTE)
        error = load_tile(v, first, left, head, HV, column, V, C, BV).to(COMPUTE)
        error -= of_s[:, None] * product(p_tile, s_operand, PRECISION, COMPUTE)
        error += of_m[:, None] * product(p_tile, m_operand, PRECISION, COMPUTE)
        inverse_tile = load_tile(inverse, first, left, head, HV, 0, C, C, C)
        r_tile = product(inverse_tile, error, SOLVE_PRECISION, COMPUTE).to(dtype)
        if residual is not None:
            store_tile(residual, r_tile, first, left, head, HV, column, V, C, BV)

        q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
        of_s, of_m = load_coefficients(coefficients, 1, first, left, head, HV, plane, C, COMPUTE)
        out = of_s[:, None] * product(q_tile, s_operand, PRECISION, COMPUTE)
        out -= of_m[:, None] * product(q_tile, m_operand, PRECISION, COMPUTE)
        out += product(load_tile(scores, first, left, head, HV, 0, C, C, C), r_tile, PRECISION, COMPUTE)
        store_tile(o, out, first, left, head, HV, column, V, C, BV)

        of_s, of_m = load_coefficients(coefficients, 2, first, left, head, HV, plane, C, COMPUTE)
        decay = decays + (state_row(begin, sequence, chunk, C) * HV + head) * 4
        s, m = advance_states(s, m, k_tile, r_tile, of_s, of_m, decay, PRECISION, COMPUTE)

    store_states(final_state, s, m, sequence, sequences, head, column, HV, K, V, BK, BV)

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
    QUERY,
    READ,
    RUNTIME_NUMBERS,
    WRITE,
    add_product,
    chunk_at,
    load_coefficients,
    load_tile,
    product,
    store_tile,
)
from mdn.ops.triton.states import advance_states, load_states, locate_walk, store_states


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
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
    sequence, head, key_head, column, begin, length, chunks = locate_walk(cu_seqlens, time, H, HV, C, BV, PACKED)
    dtype: tl.constexpr = v.dtype.element_ty
    s, m = load_states(initial_state, sequence, sequences, head, column, HV, K, V, BK, BV, COMPUTE)

    for chunk in range(chunks):
        first, left, row = chunk_at(begin, length, sequence, chunk, C)
        q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
        k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
        if p is None:
            p_tile = k_tile
        else:
            p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)
        query_s, query_m = load_coefficients(coefficients, QUERY, first, left, head, HV, plane, C, COMPUTE)
        read_s, read_m = load_coefficients(coefficients, READ, first, left, head, HV, plane, C, COMPUTE)
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

        write_s, write_m = load_coefficients(coefficients, WRITE, first, left, head, HV, plane, C, COMPUTE)
        decay = decays + (row * HV + head) * 4
        s, m = advance_states(s, m, k_tile, r_tile, write_s, write_m, decay, PRECISION, COMPUTE)

    store_states(final_state, s, m, sequence, sequences, head, column, HV, K, V, BK, BV)

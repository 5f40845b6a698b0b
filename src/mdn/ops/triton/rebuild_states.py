"""Kernel: the chunk-start states again, from R, one program per (sequence, value head, tile of V columns).

Writes states [chunks, HV, 2, K, V] (S, then M, before each chunk) in the input dtype: they are operands of products
only. Two products a chunk, against eight in the forward pass.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import (
    load_coefficients,
    load_tile,
    locate_sequence,
    state_offsets,
    state_row,
    tokens_left_at,
)
from mdn.ops.triton.forward_states import advance_states, load_states


@triton.jit
def store_chunk_states(states, s, m, row, head, first_column, HV, K, V, BK, BV):
    offsets, mask = state_offsets(first_column, K, V, BK, BV)
    base = states + (row * HV + head) * (2 * K * V)
    tl.store(base + offsets, s.to(states.dtype.element_ty), mask=mask)
    tl.store(base + K * V + offsets, m.to(states.dtype.element_ty), mask=mask)


@triton.jit
def rebuild_states_kernel(
    k,
    residual,
    coefficients,
    decays,
    initial_state,
    states,
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
    COMPUTE: tl.constexpr,
):
    sequence = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    key_head = head // (HV // H)
    column = tl.program_id(1) * BV
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    s, m = load_states(initial_state, sequence, sequences, head, column, HV, K, V, BK, BV, COMPUTE)

    for chunk in range(tl.cdiv(length, C)):
        first = begin + chunk * C
        left = tokens_left_at(length, chunk, C)
        row = state_row(begin, sequence, chunk, C)
        store_chunk_states(states, s, m, row, head, column, HV, K, V, BK, BV)
        k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
        r_tile = load_tile(residual, first, left, head, HV, column, V, C, BV)
        write_s, write_m = load_coefficients(coefficients, 2, first, left, head, HV, plane, C, COMPUTE)
        decay = decays + (row * HV + head) * 4
        s, m = advance_states(s, m, k_tile, r_tile, write_s, write_m, decay, PRECISION, COMPUTE)

"""Kernel: the chunk-start states again, from R, one program per (sequence, value head, tile of V columns).

Writes states [chunks, HV, 2, K, V] (S, then M, before each chunk) in the input dtype: they are operands of products
only. Two products a chunk, against eight in the forward pass.
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import RUNTIME_NUMBERS, WRITE, chunk_at, load_coefficients, load_tile
from mdn.ops.triton.states import advance_states, load_states, locate_walk, store_chunk_states


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
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
    sequence, head, key_head, column, begin, length, chunks = locate_walk(cu_seqlens, time, H, HV, C, BV, PACKED)
    s, m = load_states(initial_state, sequence, sequences, head, column, HV, K, V, BK, BV, COMPUTE)

    for chunk in range(chunks):
        first, left, row = chunk_at(begin, length, sequence, chunk, C)
        store_chunk_states(states, s, m, row, head, column, HV, K, V, BK, BV)
        k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
        r_tile = load_tile(residual, first, left, head, HV, column, V, C, BV)
        write_s, write_m = load_coefficients(coefficients, WRITE, first, left, head, HV, plane, C, COMPUTE)
        decay = decays + (row * HV + head) * 4
        s, m = advance_states(s, m, k_tile, r_tile, write_s, write_m, decay, PRECISION, COMPUTE)

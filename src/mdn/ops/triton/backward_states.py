"""Kernel: the chunks in reverse order, one program per (sequence, value head, tile of V columns).

Keeps dS and dM [K, BV] (gradients of the states after the chunk) in registers. Per chunk:
    dR = scores^T do + write_s k dS - write_m k dM,   E = inverse^T dR   (E is the gradient of v)
    dS before = abar dS          + q^T (query_s do) - p^T (read_s E)
    dM before = mbar dM - b dS   - q^T (query_m do) + p^T (read_m E)
Writes dv [tokens, HV, V], the state gradients [chunks, HV, 2, K, V] in the input dtype, and the initial state's.
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
from mdn.ops.triton.states import load_states, locate_walk, store_chunk_states, store_states


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def backward_states_kernel(
    grad_o,
    q,
    k,
    p,
    inverse,
    scores,
    coefficients,
    decays,
    grad_final_state,
    dv,
    state_gradients,
    grad_initial_state,
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
    dtype: tl.constexpr = q.dtype.element_ty
    ds, dm = load_states(grad_final_state, sequence, sequences, head, column, HV, K, V, BK, BV, COMPUTE)

    for step in range(chunks):
        first, left, row = chunk_at(begin, length, sequence, chunks - 1 - step, C)
        store_chunk_states(state_gradients, ds, dm, row, head, column, HV, K, V, BK, BV)

        k_tile = load_tile(k, first, left, key_head, H, 0, K, C, BK)
        do_tile = load_tile(grad_o, first, left, head, HV, column, V, C, BV)
        scores_tile = load_tile(scores, first, left, head, HV, 0, C, C, C)
        of_s, of_m = load_coefficients(coefficients, WRITE, first, left, head, HV, plane, C, COMPUTE)
        dr = product(tl.trans(scores_tile), do_tile, PRECISION, COMPUTE)
        dr += of_s[:, None] * product(k_tile, ds.to(dtype), PRECISION, COMPUTE)
        dr -= of_m[:, None] * product(k_tile, dm.to(dtype), PRECISION, COMPUTE)
        inverse_tile = load_tile(inverse, first, left, head, HV, 0, C, C, C)
        e = product(tl.trans(inverse_tile), dr, SOLVE_PRECISION, COMPUTE)
        store_tile(dv, e, first, left, head, HV, column, V, C, BV)

        decay = decays + (row * HV + head) * 4
        dm = tl.load(decay + 2) * dm - tl.load(decay + 1) * ds
        ds = tl.load(decay) * ds
        if p is None:
            p_tile = k_tile
        else:
            p_tile = load_tile(p, first, left, key_head, H, 0, K, C, BK)
        of_s, of_m = load_coefficients(coefficients, READ, first, left, head, HV, plane, C, COMPUTE)
        ds = add_product(ds, tl.trans(p_tile), (-of_s[:, None] * e).to(dtype), PRECISION, COMPUTE)
        dm = add_product(dm, tl.trans(p_tile), (of_m[:, None] * e).to(dtype), PRECISION, COMPUTE)
        q_tile = load_tile(q, first, left, key_head, H, 0, K, C, BK)
        of_s, of_m = load_coefficients(coefficients, QUERY, first, left, head, HV, plane, C, COMPUTE)
        wide = do_tile.to(COMPUTE)
        ds = add_product(ds, tl.trans(q_tile), (of_s[:, None] * wide).to(dtype), PRECISION, COMPUTE)
        dm = add_product(dm, tl.trans(q_tile), (-of_m[:, None] * wide).to(dtype), PRECISION, COMPUTE)

    store_states(grad_initial_state, ds, dm, sequence, sequences, head, column, HV, K, V, BK, BV)

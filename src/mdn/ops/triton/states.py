"""Device functions of the kernels that walk along a sequence with S and M (or their gradients) in registers.

One program per (sequence, value head, tile of V columns). Two layouts of states in memory:
    at the ends of sequences   [2, N, HV, K, V]         float32, given and returned by the caller
    before each chunk          [chunks, HV, 2, K, V]    in the input dtype, between the kernels of the backward pass
"""

import triton
import triton.language as tl

from mdn.ops.triton.blocks import add_product, locate_sequence, state_offsets


@triton.jit
def locate_walk(
    cu_seqlens, time, H: tl.constexpr, HV: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr
):
    """Where this program works: sequence, value head, key head, first column; first token, tokens and chunks."""
    sequence = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    return sequence, head, head // (HV // H), tl.program_id(1) * BV, begin, length, tl.cdiv(length, C)


@triton.jit
def load_states(
    states,
    sequence,
    sequences,
    head,
    first_column,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The [BK, BV] tiles of S and M at the end of a sequence, or zeros when there are none."""
    if states is None:
        return tl.zeros([BK, BV], COMPUTE), tl.zeros([BK, BV], COMPUTE)
    else:
        offsets, mask = state_offsets(first_column, K, V, BK, BV)
        base = states + (sequence * HV + head).to(tl.int64) * (K * V)
        momentum = base + sequences.to(tl.int64) * (HV * K * V)
        s = tl.load(base + offsets, mask=mask, other=0.0).to(COMPUTE)
        return s, tl.load(momentum + offsets, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def store_states(
    states,
    s,
    m,
    sequence,
    sequences,
    head,
    first_column,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """The inverse of `load_states`; does nothing when nobody wants the states."""
    if states is not None:
        offsets, mask = state_offsets(first_column, K, V, BK, BV)
        base = states + (sequence * HV + head).to(tl.int64) * (K * V)
        momentum = base + sequences.to(tl.int64) * (HV * K * V)
        tl.store(base + offsets, s.to(states.dtype.element_ty), mask=mask)
        tl.store(momentum + offsets, m.to(states.dtype.element_ty), mask=mask)


@triton.jit
def store_chunk_states(
    states,
    s,
    m,
    row,
    head,
    first_column,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """S and M of one chunk, rounded to the input dtype: later kernels use them as operands of products only."""
    offsets, mask = state_offsets(first_column, K, V, BK, BV)
    base = states + (row * HV + head) * (2 * K * V)
    tl.store(base + offsets, s.to(states.dtype.element_ty), mask=mask)
    tl.store(base + K * V + offsets, m.to(states.dtype.element_ty), mask=mask)


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

"""Kernels that walk along a sequence with S and M (or their gradients) in registers: one program per (sequence, value
head, tile of V columns).

    forward_states   chunks in order: o, the residual R and the states after the sequence
    rebuild_states   chunks in order, from R: the states before each chunk
    backward_states  chunks in reverse: the gradient of target (which is that of v) and of the states after each chunk

A chunk waits for the one before, so what counts is how long one turn of the loop takes: products one after the other,
each started and waited for. Therefore S and M share one accumulator X [BK, 2 BV] with their columns alternating. The
products p X, q X and k^T [write_S R | -write_M R] are one each: five in a row instead of eight, and twice as wide. A
thread of a tensor-core result holds pairs of neighbouring columns, so taking X apart and putting it together moves
nothing. All loads of a turn stand at its top, above every store: the compiler cannot move a load across a store, and
the pipeline of asynchronous copies begins with them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mdn.ops.triton.device import (
    DECAYS,
    QUERY_M,
    QUERY_S,
    READ_M,
    READ_S,
    RUNTIME_NUMBERS,
    VECTORS,
    WRITE_M,
    WRITE_S,
    Arithmetic,
    Shape,
    add_product,
    chunk_at,
    load_decays,
    load_keys,
    load_values,
    load_vector,
    locate_scan,
    product,
    square_at,
    state_at,
    store_values,
)


@triton.jit
def join_columns(of_S, of_M):
    """[n, BV] and [n, BV] to [n, 2 BV], columns alternating."""
    return tl.reshape(tl.join(of_S, of_M), [of_S.shape[0], 2 * of_S.shape[1]])


@triton.jit
def join_operand(of_S, of_M, arithmetic):
    """`join_columns` as the operand of a product."""
    pair = join_columns(of_S, of_M).to(arithmetic.OPERAND)
    if arithmetic.OPERAND == arithmetic.COMPUTE:
        # Something must stand between the reshape and the product: else the compiler of Triton 3.7 and 3.9 ends with
        # "Illegal shared layout" on sm_90, where float16 inputs are multiplied as TF32.
        pair += 0.0
    return pair


@triton.jit
def split_columns(pair):
    """The inverse of `join_columns`."""
    return tl.split(tl.reshape(pair, [pair.shape[0], pair.shape[1] // 2, 2]))


@triton.jit
def load_attend(attend, slot, PIECE: tl.constexpr, C: tl.constexpr):
    """attend [C, C] in pieces of PIECE numbers. The compiler gives matrices of one shape one layout: with eight numbers
    a thread, as many as 16-bit numbers want, float32 ones of the inverse meet in the banks of shared memory. Where
    copies are asynchronous, as on Hopper, smaller pieces cost nothing."""
    columns = tl.max_contiguous(tl.arange(0, C), PIECE)
    return tl.load(attend + slot * (C * C) + tl.arange(0, C)[:, None] * C + columns[None, :])


@triton.jit
def load_states(states, scan, sequences, shape, COMPUTE: tl.constexpr):
    """X [BK, 2 BV] from states [2, N, HV, K, V] at the end of a sequence, or zeros when there are none."""
    if states is None:
        return tl.zeros([shape.BK, 2 * shape.BV], COMPUTE)
    else:
        offsets, mask = state_at(scan.column, shape, shape.BV)
        offsets += (scan.sequence * shape.HV + scan.head).to(tl.int64) * (shape.K * shape.V)
        momentum = sequences.to(tl.int64) * (shape.HV * shape.K * shape.V)
        S = tl.load(states + offsets, mask=mask, other=0.0)
        M = tl.load(states + momentum + offsets, mask=mask, other=0.0)
        return join_columns(S.to(COMPUTE), M.to(COMPUTE))


@triton.jit
def store_states(states, X, scan, sequences, shape):
    """The inverse of `load_states`; does nothing when the states are not wanted."""
    if states is not None:
        offsets, mask = state_at(scan.column, shape, shape.BV)
        offsets += (scan.sequence * shape.HV + scan.head).to(tl.int64) * (shape.K * shape.V)
        momentum = sequences.to(tl.int64) * (shape.HV * shape.K * shape.V)
        S, M = split_columns(X)
        tl.store(states + offsets, S.to(states.dtype.element_ty), mask=mask)
        tl.store(states + momentum + offsets, M.to(states.dtype.element_ty), mask=mask)


@triton.jit
def store_chunk_states(states, S, M, slot, column, shape):
    """S and M [BK, BV] into states [slots, 2, K, V] in the operand dtype: later kernels use them as operands of
    products only."""
    offsets, mask = state_at(column, shape, shape.BV)
    S_at = states + slot * (2 * shape.K * shape.V) + offsets
    tl.store(S_at, S.to(states.dtype.element_ty), mask=mask)
    tl.store(S_at + shape.K * shape.V, M.to(states.dtype.element_ty), mask=mask)


@triton.jit
def load_pair(vectors, slot, OF_S: tl.constexpr, OF_M: tl.constexpr, C: tl.constexpr):
    """Two vectors as columns [C, 1]: what multiplies products with S and with M."""
    return load_vector(vectors, slot, OF_S, C)[:, None], load_vector(vectors, slot, OF_M, C)[:, None]


class Turn(NamedTuple):
    """What a turn of `forward_states` or `backward_states` loads of its chunk."""

    q: tl.tensor  # [C, BK] OPERAND, as are k and p
    k: tl.tensor
    p: tl.tensor
    v: tl.tensor  # [C, BV], or of grad_o
    inverse: tl.tensor  # [C, C]
    attend: tl.tensor  # [C, C]
    read_S: tl.tensor  # [C, 1], as are the other vectors
    read_M: tl.tensor
    query_S: tl.tensor
    query_M: tl.tensor
    write_S: tl.tensor
    write_M: tl.tensor
    abar: tl.tensor  # numbers, of the whole chunk
    b: tl.tensor
    mbar: tl.tensor


@triton.jit
def load_turn(q, k, p, v, attend, inverse, vectors, scan, chunk, shape, PIECE: tl.constexpr, OPERAND: tl.constexpr):
    """All loads of a turn but that of erase, which only float32 inputs need."""
    k_tile = load_keys(k, chunk, scan.key_head, shape).to(OPERAND)
    if p is None:
        p_tile = k_tile
    else:
        p_tile = load_keys(p, chunk, scan.key_head, shape).to(OPERAND)
    q_tile = load_keys(q, chunk, scan.key_head, shape).to(OPERAND)
    v_tile = load_values(v, chunk, scan.head, scan.column, shape)
    inverse_tile = tl.load(square_at(inverse, chunk.slot, shape.C))
    attend_tile = load_attend(attend, chunk.slot, PIECE, shape.C)
    read_S, read_M = load_pair(vectors, chunk.slot, READ_S, READ_M, shape.C)
    query_S, query_M = load_pair(vectors, chunk.slot, QUERY_S, QUERY_M, shape.C)
    write_S, write_M = load_pair(vectors, chunk.slot, WRITE_S, WRITE_M, shape.C)
    abar, b, mbar = load_decays(vectors, chunk.slot, DECAYS, VECTORS, shape.C)
    return Turn(
        q=q_tile, k=k_tile, p=p_tile, v=v_tile, inverse=inverse_tile, attend=attend_tile,
        read_S=read_S, read_M=read_M, query_S=query_S, query_M=query_M, write_S=write_S, write_M=write_M,
        abar=abar, b=b, mbar=mbar,
    )  # fmt: skip


@triton.jit
def rows_before_damage(target):
    """[C, BV]: whether every number of the column is finite up to this row."""
    rows = tl.arange(0, target.shape[0])[:, None]
    first = tl.min(tl.where(target * 0.0 == 0.0, target.shape[0], rows), axis=0)  # [BV]
    return rows < first[None, :]


@triton.jit
def forward_turn(
    X, q, k, p, v, attend, erase, inverse, vectors, o, residual, scan, number, shape, arithmetic,
    PIECE: tl.constexpr, CONTAIN: tl.constexpr,
):  # fmt: skip
    """One chunk: stores o and the residual, returns X [BK, 2 BV] after it. CONTAIN, in the kernel of that name, keeps
    what is not finite from earlier tokens of the chunk: in the products below it would meet them as 0 * NaN."""
    chunk = chunk_at(scan.begin, scan.length, scan.sequence, number, scan.head, shape.HV, shape.C)
    turn = load_turn(q, k, p, v, attend, inverse, vectors, scan, chunk, shape, PIECE, arithmetic.OPERAND)
    operand = X.to(arithmetic.OPERAND)
    of_S, of_M = split_columns(product(turn.p, operand, arithmetic))
    target = turn.v.to(arithmetic.COMPUTE) - turn.read_S * of_S + turn.read_M * of_M  # (6) [C, BV]
    if CONTAIN:
        clean = rows_before_damage(target)
        target = tl.where(clean, target, 0.0)
    if o is not None:
        of_S, of_M = split_columns(product(turn.q, operand, arithmetic))
        out = turn.query_S * of_S - turn.query_M * of_M
    R = product(turn.inverse, target, arithmetic)
    if erase is not None:
        # A stored inverse loses digits that substitution keeps; one step of refinement brings them back.
        erase_tile = tl.load(square_at(erase, chunk.slot, shape.C))
        rest = target - R - product(erase_tile, R, arithmetic)
        R = add_product(R, turn.inverse, rest, arithmetic)
    # As it is saved: the backward pass rebuilds the states from it.
    R = R.to(v.dtype.element_ty)
    # (8)
    S, M = split_columns(X)
    wide = R.to(arithmetic.COMPUTE)
    if CONTAIN:
        R = tl.where(clean, R, 0.0)
        wide = tl.where(clean, wide, float("nan"))
    written = join_operand(turn.write_S * wide, -turn.write_M * wide, arithmetic)  # [C, 2 BV]
    X = join_columns(turn.abar * S - turn.b * M, turn.mbar * M)
    X = add_product(X, tl.trans(turn.k), written, arithmetic)
    if o is not None:
        out = add_product(out, turn.attend, R.to(arithmetic.OPERAND), arithmetic)  # (7)
        if CONTAIN:
            out = tl.where(clean, out, float("nan"))
    if residual is not None:
        store_values(residual, wide if CONTAIN else R, chunk, scan.head, scan.column, shape)
    if o is not None:
        store_values(o, out, chunk, scan.head, scan.column, shape)
    return X


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def forward_states_kernel(
    q,  # [tokens, H, K], as are k and p
    k,
    p,  # or None: k
    v,  # [tokens, HV, V]
    attend,  # [slots, C, C] OPERAND
    erase,  # [slots, C, C] COMPUTE, or None: no refinement
    inverse,  # [slots, C, C] COMPUTE
    vectors,  # [slots, VECTORS, C] COMPUTE
    initial_state,  # [2, N, HV, K, V], or None: zeros
    o,  # [tokens, HV, V], or None: only the states
    residual,  # [tokens, HV, V], or None
    final_state,  # [2, N, HV, K, V]
    cu_seqlens,  # [sequences + 1]
    time,
    sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PIECE: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=V, C=C, BK=BK, BV=BV)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    scan = locate_scan(cu_seqlens, time, shape, PACKED)
    X = load_states(initial_state, scan, sequences, shape, COMPUTE)

    for number in range(tl.cdiv(scan.length, C)):
        X = forward_turn(
            X, q, k, p, v, attend, erase, inverse, vectors, o, residual, scan, number, shape, arithmetic,
            PIECE, False,
        )  # fmt: skip
    store_states(final_state, X, scan, sequences, shape)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def rebuild_states_kernel(
    k,  # [tokens, H, K]
    residual,  # [tokens, HV, V]
    vectors,  # [slots, VECTORS, C] COMPUTE
    initial_state,  # [2, N, HV, K, V], or None: zeros
    states,  # [slots, 2, K, V] OPERAND: S and M before each chunk
    cu_seqlens,  # [sequences + 1]
    time,
    sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=V, C=C, BK=BK, BV=BV)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    scan = locate_scan(cu_seqlens, time, shape, PACKED)
    S, M = split_columns(load_states(initial_state, scan, sequences, shape, COMPUTE))  # [BK, BV] each

    for number in range(tl.cdiv(scan.length, C)):
        chunk = chunk_at(scan.begin, scan.length, scan.sequence, number, scan.head, HV, C)
        keys = tl.trans(load_keys(k, chunk, scan.key_head, shape).to(OPERAND))  # [BK, C]
        R = load_values(residual, chunk, scan.head, scan.column, shape).to(COMPUTE)  # [C, BV]
        write_S, write_M = load_pair(vectors, chunk.slot, WRITE_S, WRITE_M, C)
        abar, b, mbar = load_decays(vectors, chunk.slot, DECAYS, VECTORS, C)
        store_chunk_states(states, S, M, chunk.slot, scan.column, shape)
        # (8). Nothing reads S and M here, so they need not share an accumulator, and operands come without conflicts.
        S = add_product(abar * S - b * M, keys, (write_S * R).to(OPERAND), arithmetic)
        M = add_product(mbar * M, keys, (-write_M * R).to(OPERAND), arithmetic)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def backward_states_kernel(
    grad_o,  # [tokens, HV, V]
    q,  # [tokens, H, K], as are k and p
    k,
    p,  # or None: k
    attend,  # [slots, C, C] OPERAND
    erase,  # [slots, C, C] COMPUTE, or None: no refinement
    inverse,  # [slots, C, C] COMPUTE: the transpose of the inverse
    vectors,  # [slots, VECTORS, C] COMPUTE
    grad_final_state,  # [2, N, HV, K, V], or None: zeros
    grad_v,  # [tokens, HV, V]
    grad_states,  # [slots, 2, K, V] OPERAND: gradients of S and M after each chunk
    grad_initial_state,  # [2, N, HV, K, V], or None
    cu_seqlens,  # [sequences + 1]
    time,
    sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PIECE: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=V, C=C, BK=BK, BV=BV)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    scan = locate_scan(cu_seqlens, time, shape, PACKED)
    grad_X = load_states(grad_final_state, scan, sequences, shape, COMPUTE)
    chunks = tl.cdiv(scan.length, C)

    for step in range(chunks):
        chunk = chunk_at(scan.begin, scan.length, scan.sequence, chunks - 1 - step, scan.head, HV, C)
        turn = load_turn(q, k, p, grad_o, attend, inverse, vectors, scan, chunk, shape, PIECE, OPERAND)
        grad_o_tile = turn.v.to(OPERAND)  # [C, BV]
        of_S, of_M = split_columns(product(turn.k, grad_X.to(OPERAND), arithmetic))
        grad_R = turn.write_S * of_S - turn.write_M * of_M
        grad_R = add_product(grad_R, tl.trans(turn.attend), grad_o_tile, arithmetic)  # (9) [C, BV]
        grad_target = product(turn.inverse, grad_R, arithmetic)  # (10) [C, BV]
        if erase is not None:
            erase_tile = tl.load(square_at(erase, chunk.slot, C))
            rest = grad_R - grad_target - product(tl.trans(erase_tile), grad_target, arithmetic)
            grad_target = add_product(grad_target, turn.inverse, rest, arithmetic)
        grad_S, grad_M = split_columns(grad_X)
        store_chunk_states(grad_states, grad_S, grad_M, chunk.slot, scan.column, shape)
        # (11)
        grad_X = join_columns(turn.abar * grad_S, turn.mbar * grad_M - turn.b * grad_S)
        wide = grad_o_tile.to(COMPUTE)
        asked = join_operand(turn.query_S * wide, -turn.query_M * wide, arithmetic)  # [C, 2 BV]
        grad_X = add_product(grad_X, tl.trans(turn.q), asked, arithmetic)
        probed = join_operand(-turn.read_S * grad_target, turn.read_M * grad_target, arithmetic)  # [C, 2 BV]
        grad_X = add_product(grad_X, tl.trans(turn.p), probed, arithmetic)
        store_values(grad_v, grad_target, chunk, scan.head, scan.column, shape)

    store_states(grad_initial_state, grad_X, scan, sequences, shape)

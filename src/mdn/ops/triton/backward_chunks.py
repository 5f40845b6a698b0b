"""Kernels of the backward pass that take all chunks at once, before the gates.

    backward_scores  per (chunk, value head): gradients of the [C, C] matrices qk, pk and gamma_S
    backward_inputs  per (chunk, key head): gradients of q, k and p, and what the gates' gradients need from the states

Loops over V bring their operands in through the load pipeline, so that the next slice is on its way during a product.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mdn.ops.triton.device import (
    GRAD_ABAR,
    GRAD_ABAR_BEFORE,
    GRAD_ALPHA_IN_P,
    GRAD_DECAYS,
    GRAD_VECTORS,
    GRAD_WRITE_S,
    K_FACTOR,
    P_FACTOR,
    Q_FACTOR,
    QUERY_S,
    READ_S,
    RUNTIME_NUMBERS,
    VECTORS,
    WRITE_S,
    Arithmetic,
    Chunk,
    Shape,
    add_product,
    inverse_norm,
    load_key_slice,
    load_keys,
    load_values,
    load_vector,
    locate_chunk,
    square_at,
    state_at,
    store_decays,
    store_keys,
    vector_at,
)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def backward_scores_kernel(
    grad_o,  # [tokens, HV, V], as are residual and grad_v
    residual,
    grad_v,
    q,  # [tokens, H, K], as are k and p
    k,
    p,  # or None: k
    vectors,  # [slots, VECTORS, C] COMPUTE
    gamma_S,  # [slots, C, C] COMPUTE
    grad_qk,  # [slots, C, C] OPERAND
    grad_pk,  # [slots, C, C] OPERAND
    grad_gamma_S,  # [slots, C, C] COMPUTE: all but the last row's part in the states
    chunk_indices,  # [chunks, 2]
    cu_seqlens,  # [sequences + 1]
    time,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Token i + 1 probes with row i of gamma_S. So p and grad_v are read one token ahead, and grad_pk is written one
    row ahead: no matrix has to be shifted. With LOOKAHEAD token i probes with row i, without its diagonal."""
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=V, C=C, BK=BK, BV=BV)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    chunk, head = locate_chunk(chunk_indices, cu_seqlens, time, HV, HV, C, PACKED)
    key_head = head // (HV // H)
    slot = chunk.slot
    STEP: tl.constexpr = 0 if LOOKAHEAD else 1
    probing = Chunk(first=chunk.first + STEP, left=tl.minimum(chunk.left, C) - STEP, slot=slot)
    rows = tl.arange(0, C)
    i, j = rows[:, None], rows[None, :]
    gamma_S_tile = tl.load(square_at(gamma_S, slot, C))
    k_factor = load_vector(vectors, slot, K_FACTOR, C)
    q_factor = load_vector(vectors, slot, Q_FACTOR, C)
    p_factor = tl.load(vector_at(vectors, slot, P_FACTOR, VECTORS, C) + STEP, mask=rows < C - STEP, other=0.0)

    # (12)
    grad_attend = tl.zeros([C, C], COMPUTE)
    grad_erase = tl.zeros([C, C], COMPUTE)  # negative, row i belongs to token i + STEP
    for column in range(0, V, BV):
        R = tl.trans(load_values(residual, chunk, head, column, shape).to(OPERAND))  # [BV, C]
        grad_o_tile = load_values(grad_o, chunk, head, column, shape).to(OPERAND)  # [C, BV]
        grad_target = load_values(grad_v, probing, head, column, shape).to(OPERAND)  # [C, BV]
        grad_attend = add_product(grad_attend, grad_o_tile, R, arithmetic)
        grad_erase = add_product(grad_erase, grad_target, R, arithmetic)
    # (13)
    grad_attend *= q_factor[:, None] * k_factor[None, :]
    grad_erase *= -p_factor[:, None] * k_factor[None, :]
    if LOOKAHEAD:
        grad_erase = tl.where(i > j, grad_erase, 0.0)
    tl.store(square_at(grad_qk, slot, C), (grad_attend * gamma_S_tile).to(grad_qk.dtype.element_ty))
    of_pk = (grad_erase * gamma_S_tile).to(grad_pk.dtype.element_ty)
    tl.store(square_at(grad_pk, slot, C) + STEP * C, of_pk, mask=i < C - STEP)
    if not LOOKAHEAD:
        tl.store(grad_pk + slot * (C * C) + rows, tl.zeros([C], grad_pk.dtype.element_ty))

    qk = tl.zeros([C, C], COMPUTE)
    pk = tl.zeros([C, C], COMPUTE)  # row i belongs to token i + STEP
    for column in range(0, K, BLOCK):
        keys = tl.trans(load_key_slice(k, chunk, key_head, column, shape, BLOCK).to(OPERAND))  # [BLOCK, C]
        q_tile = load_key_slice(q, chunk, key_head, column, shape, BLOCK).to(OPERAND)  # [C, BLOCK]
        if p is None:
            p_tile = load_key_slice(k, probing, key_head, column, shape, BLOCK).to(OPERAND)
        else:
            p_tile = load_key_slice(p, probing, key_head, column, shape, BLOCK).to(OPERAND)
        qk = add_product(qk, q_tile, keys, arithmetic)
        pk = add_product(pk, p_tile, keys, arithmetic)
    total = tl.where(i >= j, grad_attend * qk + grad_erase * pk, 0.0)
    tl.store(square_at(grad_gamma_S, slot, C), total)


@triton.jit
def store_grad_decays(grad_vectors, states, grad_states, slot, shape, BV: tl.constexpr, COMPUTE: tl.constexpr):
    """(15): <grad_S, S>, -<grad_S, M> and <grad_M, M>, the gradients of abar, b and mbar of the whole chunk. Threads
    keep sums of their own until the end."""
    of_abar = tl.zeros([shape.BK, BV], COMPUTE)
    of_b = tl.zeros([shape.BK, BV], COMPUTE)
    of_mbar = tl.zeros([shape.BK, BV], COMPUTE)
    for column in range(0, shape.V, BV):
        offsets, mask = state_at(column, shape, BV)
        S = tl.load(states + offsets, mask=mask, other=0.0).to(COMPUTE)  # [BK, BV]
        M = tl.load(states + shape.K * shape.V + offsets, mask=mask, other=0.0).to(COMPUTE)
        grad_S = tl.load(grad_states + offsets, mask=mask, other=0.0).to(COMPUTE)
        grad_M = tl.load(grad_states + shape.K * shape.V + offsets, mask=mask, other=0.0).to(COMPUTE)
        of_abar += grad_S * S
        of_b -= grad_S * M
        of_mbar += grad_M * M
    abar, b, mbar = tl.sum(of_abar), tl.sum(of_b), tl.sum(of_mbar)
    store_decays(grad_vectors, abar, b, mbar, slot, GRAD_DECAYS, GRAD_VECTORS, shape.C)


@triton.jit
def store_row_sums(grad_vectors, factor, products, tile, slot, WHICH: tl.constexpr):
    """factor [C] times the row sums of products [C, BK] with a tile [C, BK], as vector WHICH."""
    at = vector_at(grad_vectors, slot, WHICH, GRAD_VECTORS, tile.shape[0])
    tl.store(at, factor * tl.sum(products * tile, axis=1))


@triton.jit
def store_raw_gradient(output, gradient, tile, chunk, key_head, shape, L2NORM: tl.constexpr):
    """(18): the gradient of rows as they were given, a tile [C, BK]; ``gradient`` [C, BK] is the normalising factor
    times that of the normalised rows."""
    if L2NORM:
        normalised = inverse_norm(tile, L2NORM, gradient.dtype)[:, None] * tile
        gradient -= normalised * tl.sum(gradient * normalised, axis=1)[:, None]
    store_keys(output, gradient, chunk, key_head, shape)


class Place(NamedTuple):
    """Where a part of `backward_inputs` works: one chunk, a value head and its key head."""

    chunk: Chunk
    slot: tl.tensor
    head: tl.tensor
    key_head: tl.tensor


@triton.jit
def key_sources(q, k, p, chunk, key_head, shape, arithmetic, HELD: tl.constexpr):
    """q, k and p for `tile_of`. Where tensor cores read operands from shared memory (Hopper), there are registers to
    hold the tiles [C, BK] from the beginning (HELD), and no part waits for their loads. Elsewhere these are the
    tensors."""
    if HELD:
        q_tile = load_keys(q, chunk, key_head, shape).to(arithmetic.OPERAND)
        k_tile = load_keys(k, chunk, key_head, shape).to(arithmetic.OPERAND)
        p_tile = k_tile if p is None else load_keys(p, chunk, key_head, shape).to(arithmetic.OPERAND)
        return q_tile, k_tile, p_tile
    else:
        return q, k, k if p is None else p


@triton.jit
def tile_of(source, chunk, key_head, shape, arithmetic, HELD: tl.constexpr):
    """A tile [C, BK] of q, k or p, held or loaded here."""
    if HELD:
        return source
    else:
        return load_keys(source, chunk, key_head, shape).to(arithmetic.OPERAND)


@triton.jit
def through_state(x, state, place, shape, arithmetic):
    """x state^T [C, BK] of a tensor x [tokens, HV, V] and a state [K, V]."""
    total = tl.zeros([shape.C, shape.BK], arithmetic.COMPUTE)
    for column in range(0, shape.V, shape.BV):
        offsets, mask = state_at(column, shape, shape.BV)
        x_tile = load_values(x, place.chunk, place.head, column, shape).to(arithmetic.OPERAND)  # [C, BV]
        state_tile = tl.load(state + offsets, mask=mask, other=0.0)  # [BK, BV]
        total = add_product(total, x_tile, tl.trans(state_tile), arithmetic)
    return total


@triton.jit
def through_both_states(x, states, place, shape, arithmetic):
    """`through_state` of S and M [2, K, V] in one loop: x is loaded once, and two products are on their way."""
    of_S = tl.zeros([shape.C, shape.BK], arithmetic.COMPUTE)
    of_M = tl.zeros([shape.C, shape.BK], arithmetic.COMPUTE)
    for column in range(0, shape.V, shape.BV):
        offsets, mask = state_at(column, shape, shape.BV)
        x_tile = load_values(x, place.chunk, place.head, column, shape).to(arithmetic.OPERAND)  # [C, BV]
        S = tl.load(states + offsets, mask=mask, other=0.0)  # [BK, BV]
        M = tl.load(states + shape.K * shape.V + offsets, mask=mask, other=0.0)  # [BK, BV]
        of_S = add_product(of_S, x_tile, tl.trans(S), arithmetic)
        of_M = add_product(of_M, x_tile, tl.trans(M), arithmetic)
    return of_S, of_M


@triton.jit
def states_part(
    x, states, source, vectors, grad_vectors, place, FIRST: tl.constexpr, FACTOR: tl.constexpr, GRAD: tl.constexpr,
    SIGN: tl.constexpr, shape, arithmetic, HELD: tl.constexpr,
):  # fmt: skip
    """SIGN (diag(a) x S^T - diag(b) x M^T) [C, BK] with the vectors a = FIRST and b = FIRST + 1 (14); stores the
    gradients of a and b before they were multiplied by the vector FACTOR of q, p or k, whose tile is ``source``, as
    vectors GRAD and GRAD + 1 (15)."""
    of_S_factor = SIGN * load_vector(vectors, place.slot, FIRST, shape.C)[:, None]
    of_M_factor = SIGN * load_vector(vectors, place.slot, FIRST + 1, shape.C)[:, None]
    factor = SIGN * load_vector(vectors, place.slot, FACTOR, shape.C)
    if HELD:
        of_S, of_M = through_both_states(x, states, place, shape, arithmetic)
        tile = tile_of(source, place.chunk, place.key_head, shape, arithmetic, HELD)
        store_row_sums(grad_vectors, factor, of_S, tile, place.slot, GRAD)
        store_row_sums(grad_vectors, -factor, of_M, tile, place.slot, GRAD + 1)
        return of_S_factor * of_S - of_M_factor * of_M
    else:
        of_S = through_state(x, states, place, shape, arithmetic)
        tile = tile_of(source, place.chunk, place.key_head, shape, arithmetic, HELD)
        store_row_sums(grad_vectors, factor, of_S, tile, place.slot, GRAD)
        part = of_S_factor * of_S
        of_M = through_state(x, states + shape.K * shape.V, place, shape, arithmetic)
        tile = tile_of(source, place.chunk, place.key_head, shape, arithmetic, HELD)
        store_row_sums(grad_vectors, -factor, of_M, tile, place.slot, GRAD + 1)
        return part - of_M_factor * of_M


@triton.jit
def place_of(chunk, key_head, member, shape):
    """Where value head number ``member`` of a key head works."""
    head = key_head * (shape.HV // shape.H) + member
    return Place(chunk=chunk, slot=chunk.slot + member, head=head, key_head=key_head)


@triton.jit
def part_of_q(grad_o, states, grad_qk, q, k, vectors, grad_vectors, place, shape, arithmetic, HELD: tl.constexpr):
    """What one value head adds to the gradient of q [C, BK] (14). q and k are those of `key_sources`, as below."""
    weights = tl.load(square_at(grad_qk, place.slot, shape.C))  # [C, C]
    part = states_part(
        grad_o, states, q, vectors, grad_vectors, place, QUERY_S, Q_FACTOR, GRAD_ABAR, 1.0, shape, arithmetic, HELD
    )
    return add_product(part, weights, tile_of(k, place.chunk, place.key_head, shape, arithmetic, HELD), arithmetic)


@triton.jit
def part_of_k(
    residual, grad_states, grad_qk, grad_pk, q, k, p, vectors, grad_vectors, place, shape, arithmetic,
    HELD: tl.constexpr,
):  # fmt: skip
    """What one value head adds to the gradient of k [C, BK] as a key (14)."""
    part = states_part(
        residual, grad_states, k, vectors, grad_vectors, place, WRITE_S, K_FACTOR, GRAD_WRITE_S, 1.0,
        shape, arithmetic, HELD,
    )  # fmt: skip
    weights = tl.trans(tl.load(square_at(grad_qk, place.slot, shape.C)))  # [C, C]
    part = add_product(part, weights, tile_of(q, place.chunk, place.key_head, shape, arithmetic, HELD), arithmetic)
    weights = tl.trans(tl.load(square_at(grad_pk, place.slot, shape.C)))  # [C, C]
    return add_product(part, weights, tile_of(p, place.chunk, place.key_head, shape, arithmetic, HELD), arithmetic)


@triton.jit
def part_of_p(grad_v, states, grad_pk, k, p, vectors, grad_vectors, place, shape, arithmetic, HELD: tl.constexpr):
    """What one value head adds to the gradient of p [C, BK] (14); stores that of log_alpha, which multiplies p."""
    part = states_part(
        grad_v, states, p, vectors, grad_vectors, place, READ_S, P_FACTOR, GRAD_ABAR_BEFORE, -1.0,
        shape, arithmetic, HELD,
    )  # fmt: skip
    weights = tl.load(square_at(grad_pk, place.slot, shape.C))  # [C, C]
    part = add_product(part, weights, tile_of(k, place.chunk, place.key_head, shape, arithmetic, HELD), arithmetic)
    tile = tile_of(p, place.chunk, place.key_head, shape, arithmetic, HELD)
    store_row_sums(grad_vectors, 1.0, part, tile, place.slot, GRAD_ALPHA_IN_P)
    return part


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def backward_inputs_kernel(
    grad_o,  # [tokens, HV, V], as are residual and grad_v
    residual,
    grad_v,
    q,  # [tokens, H, K], as are k and p
    k,
    p,  # or None: k
    vectors,  # [slots, VECTORS, C] COMPUTE
    states,  # [slots, 2, K, V] OPERAND: before each chunk
    grad_states,  # [slots, 2, K, V] OPERAND: after each chunk
    grad_qk,  # [slots, C, C] OPERAND
    grad_pk,  # [slots, C, C] OPERAND
    grad_q,  # [tokens, H, K]
    grad_k,  # [tokens, H, K]
    grad_p,  # [tokens, H, K], or None
    grad_vectors,  # [slots, GRAD_VECTORS, C] COMPUTE
    chunk_indices,  # [chunks, 2]
    cu_seqlens,  # [sequences + 1]
    time,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HELD: tl.constexpr,
    L2NORM: tl.constexpr,
    PACKED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Sums over the value heads of its key head in registers, so that grouped heads need no extra buffer."""
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=V, C=C, BK=BK, BV=BV)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    chunk, key_head = locate_chunk(chunk_indices, cu_seqlens, time, H, HV, C, PACKED)
    STATE: tl.constexpr = 2 * K * V
    for member in range(HV // H):
        slot = chunk.slot + member
        state, grad_state = states + slot * STATE, grad_states + slot * STATE
        store_grad_decays(grad_vectors, state, grad_state, slot, shape, BV // 2, COMPUTE)
    q_source, k_source, p_source = key_sources(q, k, p, chunk, key_head, shape, arithmetic, HELD)

    of_q = tl.zeros([C, BK], COMPUTE)
    for member in range(HV // H):
        place = place_of(chunk, key_head, member, shape)
        state = states + place.slot * STATE
        of_q += part_of_q(
            grad_o, state, grad_qk, q_source, k_source, vectors, grad_vectors, place, shape, arithmetic, HELD
        )
    tile = tile_of(q_source, chunk, key_head, shape, arithmetic, HELD)
    store_raw_gradient(grad_q, of_q, tile, chunk, key_head, shape, L2NORM)

    of_k = tl.zeros([C, BK], COMPUTE)
    of_p = tl.zeros([C, BK], COMPUTE)
    for member in range(HV // H):
        place = place_of(chunk, key_head, member, shape)
        state, grad_state = states + place.slot * STATE, grad_states + place.slot * STATE
        of_k += part_of_k(
            residual, grad_state, grad_qk, grad_pk, q_source, k_source, p_source, vectors, grad_vectors, place,
            shape, arithmetic, HELD,
        )  # fmt: skip
        part = part_of_p(
            grad_v, state, grad_pk, k_source, p_source, vectors, grad_vectors, place, shape, arithmetic, HELD
        )
        if p is None:
            of_k += part
        else:
            of_p += part
    tile = tile_of(k_source, chunk, key_head, shape, arithmetic, HELD)
    store_raw_gradient(grad_k, of_k, tile, chunk, key_head, shape, L2NORM)
    if p is not None:
        tile = tile_of(p_source, chunk, key_head, shape, arithmetic, HELD)
        store_raw_gradient(grad_p, of_p, tile, chunk, key_head, shape, L2NORM)

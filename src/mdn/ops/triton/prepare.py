"""Kernel: everything of a chunk that does not depend on the states, one program per (chunk, value head).

Writes, per chunk and value head (names and equations as in docs/derivation.md):
    gamma_S  [C, C]  weights of the writes in S after each token; in the backward pass also gamma_M   (4), (5)
    attend   [C, C]  scale (Q K^T) * gamma_S                                                          (7)
    erase    [C, C]  (P K^T) * (gamma_S of the row before), strictly lower triangular                 (6)
    inverse  [C, C]  (I + erase)^-1; in the backward pass its transpose
    vectors  [VECTORS, C]  what multiplies rows of p, q and k in products with the states, and the chunk's decays

The steps meet in global memory, where the block's own L1 and L2 lines serve them: a matrix is stored and read back in
the shape that the next step wants, with a barrier between. In registers every such change of shape would be a reduction
through shared memory, with a barrier of its own; hundreds of them made this kernel two thirds of the forward pass.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mdn.ops.triton.device import (
    DECAYS,
    GATES,
    K_FACTOR,
    L2NORM_EPS,
    P_FACTOR,
    Q_FACTOR,
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
    inverse_norm,
    load_gate,
    load_key_slice,
    load_keys,
    load_row_before,
    load_vector,
    locate_chunk,
    square_at,
    store_decays,
    store_vector,
)


@triton.jit
def load_gates(gates, COUNT: tl.constexpr, C: tl.constexpr):
    """The first COUNT of alpha, mu, beta, eta and direct, of 16 tokens, as numbers. Their loads stand together above
    the stores of these tokens: the compiler cannot move a load across a store, and each would be waited for."""
    tokens = ()
    for token in tl.static_range(16):
        of_token = ()
        for gate in tl.static_range(COUNT):
            of_token = of_token + (tl.load(gates + gate * C + token),)  # type: ignore[assignment]  # noqa: RUF005
        tokens = tokens + (of_token,)  # type: ignore[assignment]  # noqa: RUF005
    return tokens


class Decays(NamedTuple):
    """What is left of S0 and M0 before each token, what a chunk writes into the states, and its decays."""

    abar: tl.tensor  # [C], before each token, as are b and mbar
    b: tl.tensor
    mbar: tl.tensor
    write_S: tl.tensor  # [C], the last row of gamma_S
    write_M: tl.tensor  # [C], the last row of gamma_M
    abar_end: tl.tensor  # numbers, after the last token
    b_end: tl.tensor
    mbar_end: tl.tensor


@triton.jit
def write_gammas(gates, gamma_S, gamma_M, square, DIRECT: tl.constexpr, C: tl.constexpr, COMPUTE: tl.constexpr):
    """(3), (4) and (5), token by token: row i of gamma_S and gamma_M [C, C], which begin at ``square``, after token i.

    gates points to alpha, mu, beta, eta and, with DIRECT, direct [5, C]. A row [C] is one number per thread, that of
    the token it belongs to, so a step is a handful of instructions and no thread waits for another. Only numbers >= 0
    are multiplied and summed: nothing is divided, clamped or subtracted, and a gate that is zero is exact.
    """
    j = tl.arange(0, C)
    row_S, row_M = tl.zeros([C], COMPUTE), tl.zeros([C], COMPUTE)
    abar_before, b_before, mbar_before = tl.zeros([C], COMPUTE), tl.zeros([C], COMPUTE), tl.zeros([C], COMPUTE)
    abar, b, mbar = tl.full([], 1.0, COMPUTE), tl.full([], 0.0, COMPUTE), tl.full([], 1.0, COMPUTE)
    for first in range(0, C, 16):
        loaded = load_gates(gates + first, 5 if DIRECT else 4, C)
        for token in tl.static_range(16):
            alpha, mu, beta, eta = loaded[token][0], loaded[token][1], loaded[token][2], loaded[token][3]
            i = first + token
            abar_before = tl.where(j == i, abar, abar_before)
            b_before = tl.where(j == i, b, b_before)
            mbar_before = tl.where(j == i, mbar, mbar_before)
            abar *= alpha
            mbar *= mu
            b = alpha * b + beta * mbar
            row_M = mu * row_M + tl.where(j == i, eta, 0.0)
            row_S = alpha * row_S + beta * row_M
            if DIRECT:
                row_S += tl.where(j == i, loaded[token][4], 0.0)
            tl.store(gamma_S + square + i * C + j, row_S)
            if gamma_M is not None:
                tl.store(gamma_M + square + i * C + j, row_M)
    return Decays(
        abar=abar_before, b=b_before, mbar=mbar_before, write_S=row_S, write_M=row_M,
        abar_end=abar, b_end=b, mbar_end=mbar,
    )  # fmt: skip


@triton.jit
def inner_products(x, k, chunk, key_head, shape, BLOCK: tl.constexpr, arithmetic):
    """x k^T [C, C], in slices of K that the load pipeline brings in."""
    total = tl.zeros([shape.C, shape.C], arithmetic.COMPUTE)
    for column in range(0, shape.K, BLOCK):
        x_tile = load_key_slice(x, chunk, key_head, column, shape, BLOCK).to(arithmetic.OPERAND)  # [C, BLOCK]
        k_tile = load_key_slice(k, chunk, key_head, column, shape, BLOCK).to(arithmetic.OPERAND)  # [C, BLOCK]
        total = add_product(total, x_tile, tl.trans(k_tile), arithmetic)
    return total


@triton.jit
def scale_products(attend, erase, inverse, gamma_S, vectors, slot, LOOKAHEAD: tl.constexpr, C: tl.constexpr):
    """erase (6) and attend (7) of one chunk from the plain products pk, which lies in erase, and qk, in inverse."""
    k_columns = load_vector(vectors, slot, K_FACTOR, C)[None, :]
    if LOOKAHEAD:  # the error is read after the token's own decays: its row, without its own write
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        weights = tl.load(square_at(gamma_S, slot, C), mask=i > j, other=0.0)
    else:
        weights = load_row_before(gamma_S, slot, C)
    scaled = tl.load(square_at(erase, slot, C)) * weights  # [C, C]
    scaled *= load_vector(vectors, slot, P_FACTOR, C)[:, None] * k_columns
    tl.store(square_at(erase, slot, C), scaled)
    scaled = tl.load(square_at(inverse, slot, C)) * tl.load(square_at(gamma_S, slot, C))  # [C, C]
    scaled *= load_vector(vectors, slot, Q_FACTOR, C)[:, None] * k_columns
    tl.store(square_at(attend, slot, C), scaled.to(attend.dtype.element_ty))


@triton.jit
def corner(matrix, PAIRS: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr):
    """Pointers [PAIRS, SIZE, SIZE] of the first SIZE x SIZE block of every pair of blocks on the diagonal."""
    pair = tl.arange(0, PAIRS)[:, None, None] * (2 * SIZE * (C + 1))
    return matrix + pair + (tl.arange(0, SIZE)[:, None] * C + tl.arange(0, SIZE)[None, :])[None, :, :]


@triton.jit
def exact_product(a, b, EXACT: tl.constexpr, COMPUTE: tl.constexpr):
    """a @ b [PAIRS, SIZE, SIZE] of coefficients, always with float32 quality."""
    return tl.dot(a, b, acc=tl.zeros(a.shape, COMPUTE), input_precision=EXACT, out_dtype=COMPUTE)


@triton.jit
def join_blocks(
    erase,
    inverse,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXACT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """From the inverses of diagonal blocks to those of twice the size:
    inverse of [[A, 0], [B, D]] = [[A', 0], [-D' B A', D']]. Only true inverses are multiplied, so nothing grows that is
    not in the answer (the shorter product (I - N)(I + N^2)... loses all digits for strong gates)."""
    upper = tl.load(corner(inverse, PAIRS, SIZE, C))  # A' [PAIRS, SIZE, SIZE], or its transpose
    below = tl.load(corner(erase, PAIRS, SIZE, C) + SIZE * C)  # B
    lower = tl.load(corner(inverse, PAIRS, SIZE, C) + SIZE * (C + 1))  # D', or its transpose
    if TRANSPOSED:
        half = exact_product(upper, tl.permute(below, [0, 2, 1]), EXACT, COMPUTE)
        tl.store(corner(inverse, PAIRS, SIZE, C) + SIZE, -exact_product(half, lower, EXACT, COMPUTE))
    else:
        half = exact_product(lower, below, EXACT, COMPUTE)
        tl.store(corner(inverse, PAIRS, SIZE, C) + SIZE * C, -exact_product(half, upper, EXACT, COMPUTE))


@triton.jit
def join_all_blocks(
    erase, inverse, C: tl.constexpr, TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr
):
    """From the inverses of 16 x 16 blocks on the diagonal to the whole inverse [C, C]."""
    if C >= 32:
        tl.debug_barrier()
        join_blocks(erase, inverse, C // 32, 16, C, TRANSPOSED, EXACT, COMPUTE)
    if C >= 64:
        tl.debug_barrier()
        join_blocks(erase, inverse, 1, 32, C, TRANSPOSED, EXACT, COMPUTE)


@triton.jit
def invert(erase, inverse, C: tl.constexpr, TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr):
    """inverse = (I + erase)^-1 of one chunk, or its transpose; both are pointers to a matrix [C, C]. Writes the blocks
    of 16 x 16 that are not zero.

    The 16 x 16 blocks on the diagonal are solved by substitution, all at once. Row i [C] holds row i of every block
    side by side, so an element is a thread. The coefficients come straight from memory, the same address for 16
    threads, and no load depends on another: they are all in flight before the first one is used. The transpose comes
    from T (I + erase) = I, column by column from the last one on.
    """
    lane = tl.arange(0, C)
    block = lane // 16 * 16
    solved = ()
    for step in tl.static_range(16):
        i = 15 - step if TRANSPOSED else step
        row = tl.where(lane % 16 == i, 1.0, 0.0).to(COMPUTE)
        for earlier in tl.static_range(step):
            if TRANSPOSED:
                weight = tl.load(erase + (block + 15 - earlier) * C + block + i)
            else:
                weight = tl.load(erase + (block + i) * C + block + earlier)
            row -= weight * solved[earlier]
        solved = solved + (row,)  # type: ignore[assignment]  # noqa: RUF005
    for step in tl.static_range(16):
        i = 15 - step if TRANSPOSED else step
        tl.store(inverse + (block + i) * C + lane, solved[step])
    join_all_blocks(erase, inverse, C, TRANSPOSED, EXACT, COMPUTE)


@triton.jit
def store_gates(
    log_alpha, log_mu, beta, eta, direct, vectors, chunk, head, HV: tl.constexpr, C: tl.constexpr, COMPUTE: tl.constexpr
):
    """Copies the gates of a chunk to where `write_gammas` reads them as numbers; returns alpha, mu and beta [C]."""
    alpha = tl.exp(load_gate(log_alpha, chunk, head, HV, C, COMPUTE))
    mu = tl.exp(load_gate(log_mu, chunk, head, HV, C, COMPUTE))
    beta_rows = load_gate(beta, chunk, head, HV, C, COMPUTE)
    store_vector(vectors, alpha, chunk.slot, GATES, C)
    store_vector(vectors, mu, chunk.slot, GATES + 1, C)
    store_vector(vectors, beta_rows, chunk.slot, GATES + 2, C)
    store_vector(vectors, load_gate(eta, chunk, head, HV, C, COMPUTE), chunk.slot, GATES + 3, C)
    if direct is not None:
        store_vector(vectors, load_gate(direct, chunk, head, HV, C, COMPUTE), chunk.slot, GATES + 4, C)
    return alpha, mu, beta_rows


@triton.jit
def key_factors(k, p, erase, chunk, key_head, shape, L2NORM: tl.constexpr, COMPUTE: tl.constexpr):
    """What normalises the rows of k and of p [C]; the products pk lie in erase."""
    if p is None and L2NORM:
        # The lengths of the keys stand on the diagonal of k k^T.
        diagonal = erase + chunk.slot * (shape.C * shape.C) + tl.arange(0, shape.C) * (shape.C + 1)
        k_factor = 1.0 / tl.sqrt(tl.load(diagonal) + L2NORM_EPS)
        p_factor = k_factor
    else:
        k_factor = inverse_norm(load_keys(k, chunk, key_head, shape), L2NORM, COMPUTE)
        p_factor = inverse_norm(load_keys(k if p is None else p, chunk, key_head, shape), L2NORM, COMPUTE)
    return k_factor, p_factor


@triton.jit
def store_factors(
    vectors, q_factor, k_factor, p_factor, alpha, mu, beta_rows, decays, slot, LOOKAHEAD: tl.constexpr, C: tl.constexpr
):
    """All that multiplies rows of q, k and p [C], and the decays of the chunk."""
    store_vector(vectors, k_factor, slot, K_FACTOR, C)
    store_vector(vectors, q_factor, slot, Q_FACTOR, C)
    store_vector(vectors, p_factor, slot, P_FACTOR, C)
    abar, b = alpha * decays.abar, alpha * decays.b + beta_rows * (mu * decays.mbar)  # [C], after each token
    store_vector(vectors, p_factor * (abar if LOOKAHEAD else decays.abar), slot, READ_S, C)
    store_vector(vectors, p_factor * (b if LOOKAHEAD else decays.b), slot, READ_M, C)
    store_vector(vectors, q_factor * abar, slot, QUERY_S, C)
    store_vector(vectors, q_factor * b, slot, QUERY_M, C)
    store_vector(vectors, k_factor * decays.write_S, slot, WRITE_S, C)
    store_vector(vectors, k_factor * decays.write_M, slot, WRITE_M, C)
    store_decays(vectors, decays.abar_end, decays.b_end, decays.mbar_end, slot, DECAYS, VECTORS, C)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def prepare_kernel(
    q,  # [tokens, H, K], as are k and p
    k,
    p,  # or None: k
    log_alpha,  # [tokens, HV], as are all gates
    log_mu,
    beta,
    eta,
    direct,  # or None: 0
    attend,  # [slots, C, C] OPERAND
    erase,  # [slots, C, C] COMPUTE
    inverse,  # [slots, C, C] COMPUTE; its transpose in the backward pass
    vectors,  # [slots, VECTORS, C] COMPUTE
    gamma_S,  # [slots, C, C] COMPUTE
    gamma_M,  # [slots, C, C] COMPUTE, or None: the forward pass
    chunk_indices,  # [chunks, 2]: sequence and number of each chunk of a pack
    cu_seqlens,  # [sequences + 1]
    time,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
    L2NORM: tl.constexpr,
    P_TIMES_ALPHA: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    PACKED: tl.constexpr,
    BACKWARD: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    EXACT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=0, C=C, BK=BK, BV=0)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    chunk, head = locate_chunk(chunk_indices, cu_seqlens, time, HV, HV, C, PACKED)
    key_head = head // (HV // H)
    slot = chunk.slot
    square = slot * (C * C)
    alpha, mu, beta_rows = store_gates(log_alpha, log_mu, beta, eta, direct, vectors, chunk, head, HV, C, COMPUTE)
    q_factor = inverse_norm(load_keys(q, chunk, key_head, shape), L2NORM, COMPUTE) * scale
    tl.debug_barrier()

    gates = vectors + (slot * VECTORS + GATES) * C
    decays = write_gammas(gates, gamma_S, gamma_M, square, direct is not None, C, COMPUTE)
    # The products as they are, in the layout of tensor cores; what scales them is read, like them, row by row.
    probe = k if p is None else p
    tl.store(square_at(erase, slot, C), inner_products(probe, k, chunk, key_head, shape, BLOCK, arithmetic))  # pk
    tl.store(square_at(inverse, slot, C), inner_products(q, k, chunk, key_head, shape, BLOCK, arithmetic))  # qk
    tl.debug_barrier()

    k_factor, p_factor = key_factors(k, p, erase, chunk, key_head, shape, L2NORM, COMPUTE)
    if P_TIMES_ALPHA:
        p_factor *= alpha
    store_factors(vectors, q_factor, k_factor, p_factor, alpha, mu, beta_rows, decays, slot, LOOKAHEAD, C)
    tl.debug_barrier()

    scale_products(attend, erase, inverse, gamma_S, vectors, slot, LOOKAHEAD, C)
    tl.debug_barrier()
    # Blocks of the inverse that stay zero; all others are written below. After the barrier: until then `inverse` holds
    # qk, which other threads read.
    row, column = tl.arange(0, C)[:, None] // 16, tl.arange(0, C)[None, :] // 16
    tl.store(square_at(inverse, slot, C), tl.zeros([C, C], COMPUTE), mask=row > column if BACKWARD else row < column)
    invert(erase + square, inverse + square, C, BACKWARD, EXACT, COMPUTE)

"""Device functions: decay masks, Gamma and the triangular inverse of a chunk, in blocks of 16 tokens.

A chunk of C tokens has C / 16 blocks. Inside blocks the masks are [C / 16, 16, 16] and their product is exact matrix
work. Between blocks Gamma has rank two: a later row sees the states at the end of the block before it, so
    Gamma[t, j] = abar_in[t] X[j] + b_in[t] Y[j]
with X and Y the last rows of Gamma and of the mu mask at the end of the block before t's, and abar_in, b_in counted
from t's block. Every term is >= 0 and nothing is subtracted. In one [C, C] piece every warp would hold a whole
operand, twice for tf32x3, and spill.
"""

import triton
import triton.language as tl


@triton.jit
def block_product(a, b, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """a @ b for a batch of small matrices [blocks, n, n]."""
    total = tl.zeros([a.shape[0], a.shape[1], b.shape[2]], COMPUTE)
    return tl.dot(a, b, acc=total, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit
def block_decays(log_gate, C: tl.constexpr):
    """L[block, i, j] = product of the gates j+1..i of a block, zero above the diagonal.

    Each column sums its own segment of logs. A difference of two cumulative sums would turn -inf into NaN and let one
    tiny gate spoil its neighbours.
    """
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    segments = tl.cumsum(tl.where(i > j, tl.reshape(log_gate, [C // 16, 16, 1]), 0.0), axis=1)
    return tl.where(i >= j, tl.exp(segments), 0.0)


@triton.jit
def earlier_block_decays(earlier_log_gate, C: tl.constexpr):
    """The same with rows moved down by one, L[block, i - 1, j]; row i of the argument holds the gate of token i - 1."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    segments = tl.cumsum(tl.where(i > j + 1, tl.reshape(earlier_log_gate, [C // 16, 16, 1]), 0.0), axis=1)
    return tl.where(i > j, tl.exp(segments), 0.0)


@triton.jit
def block_ends(rows_of_blocks):
    """The last of the 16 rows of every block: [blocks, 16, ...] to [blocks, ...]."""
    if len(rows_of_blocks.shape) == 3:
        return tl.sum(tl.where(tl.arange(0, 16)[None, :, None] == 15, rows_of_blocks, 0.0), axis=1)
    else:
        return tl.sum(tl.where(tl.arange(0, 16)[None, :] == 15, rows_of_blocks, 0.0), axis=1)


@triton.jit
def carry_over_blocks(gamma_blocks, mu_blocks, abar_in, b_in, mbar_in, C: tl.constexpr, COMPUTE: tl.constexpr):
    """What the blocks before each block hand on to it, and what the whole chunk hands on.

    Per block: X and Y [blocks, C], and (abar, b, mbar) [blocks] from the chunk's start to the block's start.
    Whole chunk: the last rows of Gamma and of the mu mask [C], and its abar, b and mbar.
    """
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    own_block = tl.arange(0, C) // 16
    gamma_ends = tl.reshape(block_ends(gamma_blocks), [C])
    mu_ends = tl.reshape(block_ends(mu_blocks), [C])
    abar_ends = block_ends(abar_in)
    b_ends = block_ends(b_in)
    mbar_ends = block_ends(mbar_in)
    x = tl.zeros([C], COMPUTE)
    y = tl.zeros([C], COMPUTE)
    x_rows = tl.zeros([BLOCKS, C], COMPUTE)
    y_rows = tl.zeros([BLOCKS, C], COMPUTE)
    abar = tl.full([BLOCKS], 1.0, COMPUTE)
    b = tl.zeros([BLOCKS], COMPUTE)
    mbar = tl.full([BLOCKS], 1.0, COMPUTE)
    for r in tl.static_range(BLOCKS):
        x_rows = tl.where(block[:, None] == r, x[None, :], x_rows)
        y_rows = tl.where(block[:, None] == r, y[None, :], y_rows)
        abar_end = tl.sum(tl.where(block == r, abar_ends, 0.0), axis=0)
        b_end = tl.sum(tl.where(block == r, b_ends, 0.0), axis=0)
        mbar_end = tl.sum(tl.where(block == r, mbar_ends, 0.0), axis=0)
        x = tl.where(own_block == r, gamma_ends, abar_end * x + b_end * y)
        y = tl.where(own_block == r, mu_ends, mbar_end * y)
        if r + 1 < BLOCKS:
            b = tl.where(block > r, abar_end * b + b_end * mbar, b)
            abar = tl.where(block > r, abar_end * abar, abar)
            mbar = tl.where(block > r, mbar_end * mbar, mbar)
        else:
            b_total = tl.sum(tl.where(block == r, abar_end * b + b_end * mbar, 0.0), axis=0)
            abar_total = tl.sum(tl.where(block == r, abar_end * abar, 0.0), axis=0)
            mbar_total = tl.sum(tl.where(block == r, mbar_end * mbar, 0.0), axis=0)
    return x_rows, y_rows, abar, b, mbar, x, y, abar_total, b_total, mbar_total


@triton.jit
def spread_blocks(blocks, C: tl.constexpr):
    """[C / 16, 16, 16] to the block-diagonal [C, C] matrix."""
    BLOCKS: tl.constexpr = C // 16
    own = (tl.arange(0, C) // 16)[:, None, None] == tl.arange(0, BLOCKS)[None, :, None]
    wide = tl.broadcast_to(tl.reshape(blocks, [C, 1, 16]), [C, BLOCKS, 16])
    return tl.reshape(tl.where(own, wide, 0.0), [C, C])


@triton.jit
def assemble(blocks, abar_in, b_in, x_rows, y_rows, C: tl.constexpr):
    """The full [C, C] matrix from its diagonal blocks and the rank-two parts between blocks."""
    between = abar_in[:, :, None] * x_rows[:, None, :] + b_in[:, :, None] * y_rows[:, None, :]
    return spread_blocks(blocks, C) + tl.reshape(between, [C, C])


@triton.jit
def decay_parts(log_gate, C: tl.constexpr):
    """The parts that a mask is made of: its blocks [C / 16, 16, 16] and products from block starts [C / 16, 16]."""
    return block_decays(log_gate, C), tl.exp(tl.cumsum(tl.reshape(log_gate, [C // 16, 16]), axis=1))


@triton.jit
def decay_mask(log_gate, C: tl.constexpr, COMPUTE: tl.constexpr):
    """A whole mask L [C, C]; between blocks it has rank one."""
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    own_block = tl.arange(0, C) // 16
    blocks, in_block = decay_parts(log_gate, C)
    ends = tl.reshape(block_ends(blocks), [C])
    totals = block_ends(in_block)
    row = tl.zeros([C], COMPUTE)
    rows = tl.zeros([BLOCKS, C], COMPUTE)
    for r in tl.static_range(BLOCKS):
        rows = tl.where(block[:, None] == r, row[None, :], rows)
        total = tl.sum(tl.where(block == r, totals, 0.0), axis=0)
        row = tl.where(own_block == r, ends, total * row)
    return spread_blocks(blocks, C) + tl.reshape(in_block[:, :, None] * rows[:, None, :], [C, C])


@triton.jit
def mask_transposed_times(blocks, in_block, matrix, C: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """L^T matrix [C, C]: a product inside blocks; rows below reach a block through their sum at its end."""
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    stacked = tl.reshape(matrix, [BLOCKS, 16, C])
    inside = block_product(tl.permute(blocks, [0, 2, 1]), stacked, PRECISION, COMPUTE)
    sums = tl.sum(in_block[:, :, None] * stacked, axis=1)
    totals = block_ends(in_block)
    below = tl.zeros([C], COMPUTE)
    handed = tl.zeros([BLOCKS, C], COMPUTE)
    for step in tl.static_range(BLOCKS):
        r = BLOCKS - 1 - step
        handed = tl.where(block[:, None] == r, below[None, :], handed)
        total = tl.sum(tl.where(block == r, totals, 0.0), axis=0)
        below = tl.sum(tl.where(block[:, None] == r, sums, 0.0), axis=0) + total * below
    return tl.reshape(inside + block_ends(blocks)[:, :, None] * handed[:, None, :], [C, C])


@triton.jit
def times_mask_transposed(matrix, blocks, in_block, C: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """matrix L^T [C, C], in the same way by columns."""
    BLOCKS: tl.constexpr = C // 16
    block = tl.arange(0, BLOCKS)
    columns = tl.reshape(matrix, [C, BLOCKS, 16])
    inside = block_product(tl.permute(columns, [1, 0, 2]), tl.permute(blocks, [0, 2, 1]), PRECISION, COMPUTE)
    sums = tl.sum(columns * block_ends(blocks)[None, :, :], axis=2)
    totals = block_ends(in_block)
    before = tl.zeros([C], COMPUTE)
    handed = tl.zeros([C, BLOCKS], COMPUTE)
    for r in tl.static_range(BLOCKS):
        handed = tl.where(block[None, :] == r, before[:, None], handed)
        total = tl.sum(tl.where(block == r, totals, 0.0), axis=0)
        before = tl.sum(tl.where(block[None, :] == r, sums, 0.0), axis=1) + total * before
    return tl.reshape(tl.permute(inside, [1, 0, 2]) + handed[:, :, None] * in_block[None, :, :], [C, C])


@triton.jit
def decay_mask_backward(weighted, C: tl.constexpr):
    """Gradient [C] of the logs from weighted = dL * L: gate l takes part in every segment with j < l <= i."""
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C)[None, :]
    from_row_on = tl.cumsum(weighted, axis=0, reverse=True)
    return tl.sum(tl.where(columns < rows, from_row_on, 0.0), axis=1)


@triton.jit
def unit_lower_inverse(strict, C: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """(I + strict)^-1 for a strictly lower triangular [C, C] matrix.

    The 16 x 16 diagonal blocks are solved row by row, all at once; then neighbouring blocks are joined by
    inv([[A, 0], [B, D]]) = [[A', 0], [-D' B A', D']]. Only true inverses are ever multiplied, so nothing grows that
    is not in the answer (the shorter product (I - N)(I + N^2)... loses all digits for strong gates).
    """
    BLOCKS: tl.constexpr = C // 16
    own = (tl.arange(0, C) // 16)[:, None, None] == tl.arange(0, BLOCKS)[None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(strict, [C, BLOCKS, 16]), 0.0), axis=1)
    diagonal = tl.reshape(diagonal, [BLOCKS, 16, 16])
    row = tl.arange(0, 16)[None, :, None]
    identity = tl.where(row == tl.arange(0, 16)[None, None, :], 1.0, 0.0).to(COMPUTE)
    solved = tl.broadcast_to(identity, [BLOCKS, 16, 16])
    for i in range(1, 16):
        weights = tl.sum(tl.where(row == i, diagonal, 0.0), axis=1)
        update = tl.sum(weights[:, :, None] * solved, axis=1)
        solved = tl.where(row == i, solved - update[:, None, :], solved)
    if C >= 32:
        solved = join_blocks(solved, strict, C // 32, 16, PRECISION, COMPUTE)
    if C >= 64:
        solved = join_blocks(solved, strict, 1, 32, PRECISION, COMPUTE)
    return tl.reshape(solved, [C, C])


@triton.jit
def join_blocks(
    inverse, strict, PAIRS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr
):
    """From the inverses [2 PAIRS, SIZE, SIZE] of diagonal blocks to those of twice the size."""
    half = tl.arange(0, 2)
    pair = tl.arange(0, PAIRS)
    # strict as (row pair, row half, row, column pair, column half, column): keep what is below the diagonal of a pair.
    parts = tl.reshape(strict, [PAIRS, 2, SIZE, PAIRS, 2, SIZE])
    wanted = tl.reshape(pair, [PAIRS, 1, 1, 1, 1, 1]) == tl.reshape(pair, [1, 1, 1, PAIRS, 1, 1])
    wanted = wanted & (tl.reshape(half, [1, 2, 1, 1, 1, 1]) == 1) & (tl.reshape(half, [1, 1, 1, 1, 2, 1]) == 0)
    below = tl.sum(tl.sum(tl.sum(tl.where(wanted, parts, 0.0), axis=4), axis=3), axis=1)

    halves = tl.reshape(inverse, [PAIRS, 2, SIZE, SIZE])
    is_lower = tl.reshape(half, [1, 2, 1, 1]) == 1
    upper = tl.sum(tl.where(is_lower, 0.0, halves), axis=1)
    lower = tl.sum(tl.where(is_lower, halves, 0.0), axis=1)
    corner = block_product(block_product(lower, below, PRECISION, COMPUTE), upper, PRECISION, COMPUTE)

    row_half = tl.reshape(half, [1, 2, 1, 1, 1])
    column_half = tl.reshape(half, [1, 1, 1, 2, 1])
    joined = tl.where(row_half == column_half, tl.reshape(halves, [PAIRS, 2, SIZE, 1, SIZE]), 0.0)
    joined -= tl.where(row_half > column_half, tl.reshape(corner, [PAIRS, 1, SIZE, 1, SIZE]), 0.0)
    return tl.reshape(joined, [PAIRS, 2 * SIZE, 2 * SIZE])

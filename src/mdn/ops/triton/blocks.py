"""Small device functions shared by the kernels: addressing, products, decay masks and the triangular inverse.

Shapes: C tokens of a chunk, D columns (K or V) padded to a power of two. COMPUTE is the dtype of coefficients and
sums (float32; float64 only under the interpreter). PRECISION is how products of float32 operands are taken.
Rows past the end of a sequence load as zeros: log gates 0, beta 0, eta 0. Such a row changes neither S nor M, so
the last row of a chunk always describes the whole chunk, however short it is.
"""

import triton
import triton.language as tl

# The same epsilon as mdn.ops.l2norm, as a device constant.
L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def locate_sequence(sequence, cu_seqlens, time, PACKED: tl.constexpr):
    """First token and number of tokens of a sequence on the flat token axis (int64)."""
    if PACKED:
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    else:
        begin = sequence.to(tl.int64) * time
        end = begin + time
    return begin, end - begin


@triton.jit
def state_row(begin, sequence, chunk, C: tl.constexpr):
    """A row of the per-chunk buffers. Unique for every chunk without knowing the other sequences' chunk counts,
    because floor((begin + length) / C) + 1 >= floor(begin / C) + ceil(length / C)."""
    return begin // C + sequence + chunk


@triton.jit
def tokens_left_at(length, chunk, C: tl.constexpr):
    """Tokens from the chunk's first to the sequence's last: rows at or past this number are empty."""
    return length - chunk * C


@triton.jit
def locate_chunk(chunk_id, chunk_indices, cu_seqlens, time, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, tokens left in the sequence and buffer row of a chunk."""
    if PACKED:
        sequence = tl.load(chunk_indices + 2 * chunk_id)
        chunk = tl.load(chunk_indices + 2 * chunk_id + 1)
    else:
        chunks = tl.cdiv(time, C)
        sequence = chunk_id // chunks
        chunk = chunk_id % chunks
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    return begin + chunk * C, tokens_left_at(length, chunk, C), state_row(begin, sequence, chunk, C)


@triton.jit
def tile_offsets(tokens_left, first_column, heads, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets and mask of a [C, BLOCK] tile of a [tokens, heads, WIDTH] tensor, from its first token and head."""
    rows = tl.arange(0, C)
    columns = first_column + tl.arange(0, BLOCK)
    mask = (rows < tokens_left)[:, None] & (columns < WIDTH)[None, :]
    return rows.to(tl.int64)[:, None] * (heads * WIDTH) + columns.to(tl.int64)[None, :], mask


@triton.jit
def load_tile(
    tensor,
    first_token,
    tokens_left,
    head,
    heads,
    first_column,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask = tile_offsets(tokens_left, first_column, heads, WIDTH, C, BLOCK)
    return tl.load(tensor + (first_token * heads + head) * WIDTH + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(
    tensor,
    tile,
    first_token,
    tokens_left,
    head,
    heads,
    first_column,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask = tile_offsets(tokens_left, first_column, heads, WIDTH, C, BLOCK)
    tl.store(tensor + (first_token * heads + head) * WIDTH + offsets, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(tensor, first_token, tokens_left, head, heads, C: tl.constexpr, COMPUTE: tl.constexpr):
    """A [C] vector of a [tokens, heads] tensor."""
    rows = tl.arange(0, C)
    pointers = tensor + first_token * heads + head + rows.to(tl.int64) * heads
    return tl.load(pointers, mask=rows < tokens_left, other=0.0).to(COMPUTE)


@triton.jit
def store_gate(tensor, values, first_token, tokens_left, head, heads, C: tl.constexpr):
    rows = tl.arange(0, C)
    pointers = tensor + first_token * heads + head + rows.to(tl.int64) * heads
    tl.store(pointers, values.to(tensor.dtype.element_ty), mask=rows < tokens_left)


@triton.jit
def load_coefficients(coefficients, which, first, left, head, heads, plane, C: tl.constexpr, COMPUTE: tl.constexpr):
    """The pair of [C] vectors that multiply products with S and with M; which: 0 read (p), 1 query (q),
    2 write (k), 3 write without eta."""
    pair = coefficients + 2 * which * plane
    of_s = load_gate(pair, first, left, head, heads, C, COMPUTE)
    return of_s, load_gate(pair + plane, first, left, head, heads, C, COMPUTE)


@triton.jit
def state_offsets(first_column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of a [BK, BV] tile of one contiguous [K, V] state."""
    rows = tl.arange(0, BK)
    columns = first_column + tl.arange(0, BV)
    return rows[:, None] * V + columns[None, :], (rows < K)[:, None] & (columns < V)[None, :]


@triton.jit
def product(a, b, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """a @ b summed in COMPUTE."""
    return add_product(tl.zeros([a.shape[0], b.shape[1]], COMPUTE), a, b, PRECISION, COMPUTE)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, COMPUTE: tl.constexpr):
    """total + a @ b. Summing in place needs half the registers of adding a finished product."""
    return tl.dot(a, b, acc=total, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit
def similarity(
    x,
    y,
    x_first,
    x_left,
    first,
    left,
    head,
    heads,
    width,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """x y^T [C, C] of two [tokens, heads, WIDTH] tensors; x may begin at another token.

    In slices of the width: an operand of a whole [C, WIDTH] tile would take half of the registers. ``width`` is WIDTH
    again, as a run-time number where the compiler must not unroll the loop.
    """
    total = tl.zeros([C, C], COMPUTE)
    for column in range(0, width, BLOCK):
        x_tile = load_tile(x, x_first, x_left, head, heads, column, WIDTH, C, BLOCK)
        y_tile = load_tile(y, first, left, head, heads, column, WIDTH, C, BLOCK)
        total = add_product(total, x_tile, tl.trans(y_tile), PRECISION, COMPUTE)
    return total


@triton.jit
def inverse_norm(tile, L2NORM: tl.constexpr, C: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor [C] that normalises each row; applied after products, so that their operands stay as given."""
    if L2NORM:
        wide = tile.to(COMPUTE)
        return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + L2NORM_EPS)
    else:
        return tl.full([C], 1.0, COMPUTE)


@triton.jit
def following(values, C: tl.constexpr):
    """values moved up one place, zero at the end: the gradient of ``previous``."""
    rows = tl.arange(0, C)
    return tl.sum(tl.where(rows[:, None] == rows[None, :] - 1, values[None, :], 0.0), axis=1)

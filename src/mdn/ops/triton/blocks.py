"""Small device functions shared by the kernels: where a chunk lies, tiles and vectors of it, and products.

Shapes: C tokens of a chunk, D columns (K or V) padded to a power of two. COMPUTE is the dtype of coefficients and
sums (float32; float64 only under the interpreter). PRECISION is how products of float32 operands are taken.
Rows past the end of a sequence load as zeros: log gates 0, beta 0, eta 0. Such a row changes neither S nor M, so
the last row of a chunk always describes the whole chunk, however short it is.
"""

import triton
import triton.language as tl

# The same epsilon as mdn.ops.l2norm, as a device constant.
L2NORM_EPS = tl.constexpr(1e-6)
# Pairs of vectors (for S, for M) in the buffer `coefficients`: what multiplies raw rows of p, q and k in products.
READ, QUERY, WRITE, WRITE_WITHOUT_ETA = (tl.constexpr(which) for which in range(4))
# Vectors of the buffer `sums`, from `backward_inputs` to `backward_gates`: gradients of abar and b by the outputs and
# by the prediction errors (row t for abar and b of token t - 1), of the last rows of Gamma and of the mu mask by the
# states after the chunk, and of log_alpha inside p.
ABAR_IN_OUTPUTS, B_IN_OUTPUTS, ABAR_IN_ERRORS, B_IN_ERRORS = (tl.constexpr(which) for which in range(4))
LAST_GAMMA_IN_STATES, LAST_MU_IN_STATES, ALPHA_IN_ERRORS = (tl.constexpr(which) for which in range(4, 7))
# Numbers that stay numbers in the compiled code. Triton would otherwise build a kernel again for each of "is 1", "is a
# multiple of 16" and "is neither", so for other lengths and batches; and it would unroll loops that end at a constant.
RUNTIME_NUMBERS = ("time", "sequences", "plane", "key_dim", "value_dim")


@triton.jit
def locate_sequence(sequence, cu_seqlens, time, PACKED: tl.constexpr):
    """First token of a sequence on the flat token axis (int64) and its number of tokens (int32)."""
    if PACKED:
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    else:
        begin = sequence.to(tl.int64) * time
        end = begin + time
    return begin, (end - begin).to(tl.int32)


@triton.jit
def chunk_at(begin, length, sequence, chunk, C: tl.constexpr):
    """First token of a chunk (int64), tokens from there to the sequence's end (int32), its row in per-chunk buffers.

    Rows of a tile at or past the tokens left, which may be more than C, are empty. Buffer rows are unique without
    knowing the other sequences' chunk counts, because
    floor((begin + length) / C) + 1 >= floor(begin / C) + ceil(length / C).
    """
    return begin + chunk * C, length - chunk * C, begin // C + sequence + chunk


@triton.jit
def locate_chunk(chunk_id, chunk_indices, cu_seqlens, time, C: tl.constexpr, PACKED: tl.constexpr):
    """`chunk_at` of the chunk with this number among the chunks of all sequences."""
    if PACKED:
        sequence = tl.load(chunk_indices + 2 * chunk_id).to(tl.int32)
        chunk = tl.load(chunk_indices + 2 * chunk_id + 1).to(tl.int32)
    else:
        chunks = tl.cdiv(time, C)
        sequence = chunk_id // chunks
        chunk = chunk_id % chunks
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    return chunk_at(begin, length, sequence, chunk, C)


@triton.jit
def tile_offsets(tokens_left, first_column, heads, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets and mask of a [C, BLOCK] tile of a [tokens, heads, WIDTH] tensor, from its first token and head.

    The offsets would fit 32 bits; as 64-bit numbers they need fewer registers in pipelined loops.
    """
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
    pointers = tensor + first_token * heads + head + rows * heads
    return tl.load(pointers, mask=rows < tokens_left, other=0.0).to(COMPUTE)


@triton.jit
def store_gate(tensor, values, first_token, tokens_left, head, heads, C: tl.constexpr):
    rows = tl.arange(0, C)
    pointers = tensor + first_token * heads + head + rows * heads
    tl.store(pointers, values.to(tensor.dtype.element_ty), mask=rows < tokens_left)


@triton.jit
def stacked(vectors, which, plane):
    """Vector number ``which`` of a [n, tokens, heads] buffer; a plane is one vector, and n of them may pass 2^31."""
    return vectors + plane.to(tl.int64) * which


@triton.jit
def load_coefficients(coefficients, which, first, left, head, heads, plane, C: tl.constexpr, COMPUTE: tl.constexpr):
    """The pair of [C] vectors that multiply products with S and with M; which: READ, QUERY, WRITE ..."""
    of_s = load_gate(stacked(coefficients, 2 * which, plane), first, left, head, heads, C, COMPUTE)
    return of_s, load_gate(stacked(coefficients, 2 * which + 1, plane), first, left, head, heads, C, COMPUTE)


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

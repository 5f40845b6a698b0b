"""Device functions shared by the kernels: where a chunk lies, how tiles and vectors are loaded, and products.

Shapes are written beside every parameter and tile. Rows past the end of a sequence load as zeros: log gates 0, beta 0,
eta 0. Such a token changes neither S nor M, so the last row of a chunk always describes the whole chunk, however short
it is.

Buffers between kernels hold one piece per chunk and value head, in a slot of their own (`Chunk.slot`): they are
contiguous, need no mask, and one asynchronous copy brings a whole piece.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# The same epsilon as mdn.ops.l2norm, as a device constant.
L2NORM_EPS = tl.constexpr(1e-6)

# The vectors [C] of the buffer `vectors` [slots, VECTORS, C]. All factors of a row are folded into them (alpha inside
# p, eta, the scale, the L2 norms), so that products take q, k and p exactly as they were given.
READ_S, READ_M = tl.constexpr(0), tl.constexpr(1)  # of p in target: abar and b of the token before (LOOKAHEAD: its own)
QUERY_S, QUERY_M = tl.constexpr(2), tl.constexpr(3)  # of q in o: abar and b
WRITE_S, WRITE_M = tl.constexpr(4), tl.constexpr(5)  # of k in the states after the chunk: last rows of gamma_S, gamma_M
DECAYS = tl.constexpr(6)  # its first three elements are abar, b and mbar of the whole chunk
Q_FACTOR, K_FACTOR, P_FACTOR = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)  # what multiplies raw rows in qk, pk
GATES = tl.constexpr(10)  # and the four after it: alpha, mu, beta, eta and, where it is given, direct
VECTORS = tl.constexpr(15)
ABAR_END, B_END, MBAR_END = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# The vectors [C] of the buffer `grad_vectors` [slots, GRAD_VECTORS, C], from `backward_inputs` to `backward_gates`.
GRAD_ABAR, GRAD_B = tl.constexpr(0), tl.constexpr(1)  # through o: row i belongs to abar and b after token i
GRAD_ABAR_BEFORE, GRAD_B_BEFORE = tl.constexpr(2), tl.constexpr(3)  # through target: to those that token i reads
GRAD_WRITE_S, GRAD_WRITE_M = tl.constexpr(4), tl.constexpr(5)  # through the states after the chunk
GRAD_ALPHA_IN_P = tl.constexpr(6)  # of log_alpha, where p is multiplied by alpha
GRAD_DECAYS = tl.constexpr(7)  # its first three elements: of abar, b and mbar of the whole chunk, through the states
GRAD_VECTORS = tl.constexpr(8)

# Numbers that stay numbers in the compiled code. Triton would otherwise build a kernel again for each of "is 1", "is a
# multiple of 16" and "is neither", so for other lengths and batches.
RUNTIME_NUMBERS = ("time", "sequences")


class Shape(NamedTuple):
    """Sizes that are constants of the compiled code."""

    H: tl.constexpr  # key heads
    HV: tl.constexpr  # value heads
    K: tl.constexpr
    V: tl.constexpr
    C: tl.constexpr  # tokens in a chunk
    BK: tl.constexpr  # K padded to a power of two: kernels hold all of it
    BV: tl.constexpr  # columns of V in a tile


class Arithmetic(NamedTuple):
    """How numbers are held and multiplied."""

    OPERAND: tl.constexpr  # dtype of the operands of large products
    COMPUTE: tl.constexpr  # dtype of coefficients and sums: float32; float64 only under the interpreter
    PRECISION: tl.constexpr  # how products of float32 operands are taken
    BY_WARP: tl.constexpr  # whether products are cut into one per warp


class Chunk(NamedTuple):
    """Where a chunk lies."""

    first: tl.tensor  # its first token on the flat token axis, int64
    left: tl.tensor  # tokens from there to the end of its sequence, which may be more than C
    slot: tl.tensor  # its place in the buffers between kernels, int64


class Scan(NamedTuple):
    """Where a program that walks along a sequence works."""

    sequence: tl.tensor
    head: tl.tensor  # value head
    key_head: tl.tensor
    column: tl.tensor  # first of its BV columns
    begin: tl.tensor  # first token of the sequence, int64
    length: tl.tensor  # its tokens


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
def chunk_at(begin, length, sequence, number, head, HV: tl.constexpr, C: tl.constexpr):
    """Chunk ``number`` of a sequence.

    Its row of the buffers is unique without knowing how many chunks the other sequences have, because
    floor((begin + length) / C) + 1 >= floor(begin / C) + ceil(length / C).
    """
    row = begin // C + sequence + number
    return Chunk(first=begin + number * C, left=length - number * C, slot=row * HV + head)


@triton.jit
def locate_chunk(
    chunk_indices, cu_seqlens, time, HEADS: tl.constexpr, HV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr
):
    """Chunk and head of a program of which there is one per chunk and head (value heads, or key heads; the slot is that
    of the first value head). Heads come first in the grid: those of a chunk lie beside each other in memory, and those
    of a group read the same q and k."""
    head = tl.program_id(0) % HEADS
    number = tl.program_id(0) // HEADS
    if PACKED:
        sequence = tl.load(chunk_indices + 2 * number).to(tl.int32)
        number = tl.load(chunk_indices + 2 * number + 1).to(tl.int32)
    else:
        chunks = tl.cdiv(time, C)
        sequence = number // chunks
        number = number % chunks
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    return chunk_at(begin, length, sequence, number, head * (HV // HEADS), HV, C), head


@triton.jit
def scan_of(number, column, cu_seqlens, time, shape, PACKED: tl.constexpr):
    """The columns from ``column`` on of value head ``number``, counted over all sequences."""
    head = number % shape.HV
    sequence = number // shape.HV
    begin, length = locate_sequence(sequence, cu_seqlens, time, PACKED)
    key_head = head // (shape.HV // shape.H)
    return Scan(sequence=sequence, head=head, key_head=key_head, column=column, begin=begin, length=length)


@triton.jit
def locate_scan(cu_seqlens, time, shape, PACKED: tl.constexpr):
    """The V tiles of one head come first in the grid. They read the same q, k, inverse and attend at the same time, so
    all but one of them find these in the L2 cache."""
    TILES: tl.constexpr = (shape.V + shape.BV - 1) // shape.BV
    column = tl.program_id(0) % TILES * shape.BV
    return scan_of(tl.program_id(0) // TILES, column, cu_seqlens, time, shape, PACKED)


# ---------------------------------------------------------------------------------------------- tensors of the caller


@triton.jit
def rows_at(
    tensor, chunk, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Pointers and mask of a tile [C, BLOCK] of a tensor [tokens, HEADS, WIDTH]."""
    rows = tl.arange(0, C)
    columns = column + tl.arange(0, BLOCK)
    pointers = tensor + (chunk.first * HEADS + head) * WIDTH + rows[:, None] * (HEADS * WIDTH) + columns[None, :]
    if WIDTH % BLOCK == 0:
        return pointers, (rows < chunk.left)[:, None]
    else:
        return pointers, (rows < chunk.left)[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def load_keys(tensor, chunk, key_head, shape):
    """Tile [C, BK] of a tensor [tokens, H, K]."""
    pointers, mask = rows_at(tensor, chunk, key_head, 0, shape.H, shape.K, shape.C, shape.BK)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_key_slice(tensor, chunk, key_head, column, shape, BLOCK: tl.constexpr):
    """Tile [C, BLOCK] of a tensor [tokens, H, K]."""
    pointers, mask = rows_at(tensor, chunk, key_head, column, shape.H, shape.K, shape.C, BLOCK)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_keys(tensor, tile, chunk, key_head, shape):
    pointers, mask = rows_at(tensor, chunk, key_head, 0, shape.H, shape.K, shape.C, shape.BK)
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def load_values(tensor, chunk, head, column, shape):
    """Tile [C, BV] of a tensor [tokens, HV, V]."""
    pointers, mask = rows_at(tensor, chunk, head, column, shape.HV, shape.V, shape.C, shape.BV)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_values(tensor, tile, chunk, head, column, shape):
    pointers, mask = rows_at(tensor, chunk, head, column, shape.HV, shape.V, shape.C, shape.BV)
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(gate, chunk, head, HV: tl.constexpr, C: tl.constexpr, COMPUTE: tl.constexpr):
    """[C] of a gate [tokens, HV]."""
    tokens = tl.arange(0, C)
    pointers = gate + chunk.first * HV + head + tokens * HV
    return tl.load(pointers, mask=tokens < chunk.left, other=0.0).to(COMPUTE)


@triton.jit
def store_gate(gate, values, chunk, head, HV: tl.constexpr, C: tl.constexpr):
    tokens = tl.arange(0, C)
    pointers = gate + chunk.first * HV + head + tokens * HV
    tl.store(pointers, values.to(gate.dtype.element_ty), mask=tokens < chunk.left)


# ------------------------------------------------------------------------------------- buffers between kernels, by slot


@triton.jit
def square_at(squares, slot, C: tl.constexpr):
    """Pointers of the matrix [C, C] of a buffer [slots, C, C]."""
    return squares + slot * (C * C) + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def load_row_before(squares, slot, C: tl.constexpr):
    """The same matrix moved down by one row, the first row zero: row i belongs to the token before token i."""
    return tl.load(square_at(squares, slot, C) - C, mask=tl.arange(0, C)[:, None] > 0, other=0.0)


@triton.jit
def vector_at(vectors, slot, WHICH: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr):
    """Pointers of vector [C] number WHICH of a buffer [slots, COUNT, C]."""
    return vectors + (slot * COUNT + WHICH) * C + tl.arange(0, C)


@triton.jit
def load_vector(vectors, slot, WHICH: tl.constexpr, C: tl.constexpr):
    """[C] of the buffer `vectors`."""
    return tl.load(vector_at(vectors, slot, WHICH, VECTORS, C))


@triton.jit
def store_vector(vectors, values, slot, WHICH: tl.constexpr, C: tl.constexpr):
    tl.store(vector_at(vectors, slot, WHICH, VECTORS, C), values)


@triton.jit
def load_decays(vectors, slot, WHICH: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr):
    """Three numbers of a whole chunk: of abar, b and mbar at its end."""
    decays = vectors + (slot * COUNT + WHICH) * C
    return tl.load(decays + ABAR_END), tl.load(decays + B_END), tl.load(decays + MBAR_END)


@triton.jit
def store_decays(vectors, abar, b, mbar, slot, WHICH: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr):
    decays = vectors + (slot * COUNT + WHICH) * C
    tl.store(decays + ABAR_END, abar)
    tl.store(decays + B_END, b)
    tl.store(decays + MBAR_END, mbar)


@triton.jit
def state_at(column, shape, BV: tl.constexpr):
    """Offsets and mask of a tile [BK, BV] of one state [K, V]."""
    rows = tl.arange(0, shape.BK)
    columns = column + tl.arange(0, BV)
    return rows[:, None] * shape.V + columns[None, :], (rows < shape.K)[:, None] & (columns < shape.V)[None, :]


# ---------------------------------------------------------------------------------------------------------- arithmetic


@triton.jit
def product(a, b, arithmetic):
    """a @ b summed in COMPUTE."""
    return add_product(tl.zeros([a.shape[0], b.shape[1]], arithmetic.COMPUTE), a, b, arithmetic)


@triton.jit
def add_product(total, a, b, arithmetic):
    """total + a @ b. Summing in place needs half the registers of adding a finished product."""
    if arithmetic.BY_WARP and a.shape[0] % 64 == 0:
        return add_product_by_warp(total, a, b, arithmetic)
    else:
        return add_dot(total, a, b, arithmetic)


@triton.jit
def add_dot(total, a, b, arithmetic):
    return tl.dot(a, b, acc=total, input_precision=arithmetic.PRECISION, out_dtype=arithmetic.COMPUTE)


@triton.jit
def add_product_by_warp(total, a, b, arithmetic):
    """total + a @ b as a batch of smaller products, cut along the longest side into one piece for each of eight warps,
    or into pieces of 16. The compiler takes a batch by mma.sync. A single product with so many rows would be wgmma on
    Hopper, with ``a`` in registers unless it is used as it was loaded, and ptxas before 13.3 may overwrite those
    registers while they are being read."""
    ROWS: tl.constexpr = a.shape[0]
    INNER: tl.constexpr = a.shape[1]
    COLUMNS: tl.constexpr = b.shape[1]
    PARTS: tl.constexpr = min(8, max(ROWS, INNER, COLUMNS) // 16)
    if INNER > ROWS and INNER > COLUMNS:
        a = tl.permute(tl.reshape(a, [ROWS, PARTS, INNER // PARTS]), [1, 0, 2])
        b = tl.reshape(b, [PARTS, INNER // PARTS, COLUMNS])
        return total + tl.sum(add_dot(tl.zeros([PARTS, ROWS, COLUMNS], arithmetic.COMPUTE), a, b, arithmetic), axis=0)
    elif COLUMNS > ROWS:
        a = tl.broadcast_to(a[None, :, :], [PARTS, ROWS, INNER])
        b = tl.permute(tl.reshape(b, [INNER, PARTS, COLUMNS // PARTS]), [1, 0, 2])
        total = tl.permute(tl.reshape(total, [ROWS, PARTS, COLUMNS // PARTS]), [1, 0, 2])
        return tl.reshape(tl.permute(add_dot(total, a, b, arithmetic), [1, 0, 2]), [ROWS, COLUMNS])
    else:
        a = tl.reshape(a, [PARTS, ROWS // PARTS, INNER])
        b = tl.broadcast_to(b[None, :, :], [PARTS, INNER, COLUMNS])
        total = tl.reshape(total, [PARTS, ROWS // PARTS, COLUMNS])
        return tl.reshape(add_dot(total, a, b, arithmetic), [ROWS, COLUMNS])


@triton.jit
def inverse_norm(tile, L2NORM: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor [C] that normalises each row of a tile [C, BK] (18); 1 where nothing is normalised."""
    if L2NORM:
        wide = tile.to(COMPUTE)
        return 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) + L2NORM_EPS)
    else:
        return tl.full([tile.shape[0]], 1.0, COMPUTE)


@triton.jit
def compose(decay, value, later_decay, later_value):
    """Two steps x -> decay x + value in a row, as one such step: what `tl.associative_scan` joins."""
    return decay * later_decay, later_decay * value + later_value


@triton.jit
def recurrence(decay, value, REVERSE: tl.constexpr = False):
    """x[i] = decay[i] x[i - 1] + value[i] for vectors [C], from x[-1] = 0; REVERSE: from the last element on."""
    return tl.associative_scan((decay, value), 0, compose, reverse=REVERSE)[1]

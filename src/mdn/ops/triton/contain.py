"""Kernel: keeps tokens that are not finite from earlier tokens, one program per (sequence, value head).

The other kernels of the forward pass multiply whole chunks. A token that is not finite reaches the tokens before it
there: in `prepare`, where blocks of the inverse are joined, and in `forward_states`, in the products with inverse and
attend, it meets their zeros as 0 * NaN. To mask it in every chunk would cost every call an estimated 5 % of the scan's
instructions. But what is not finite stays in S for good, and from there reaches the output of the last token. So this
kernel, launched after the others, looks at that one row of o. Only if it is not finite, the chunks are repaired and
walked through again, with masks.

One program does this for all columns of a value head: the matrices of a chunk are repaired in place, and no other
program reads them.
"""

import triton
import triton.language as tl

from mdn.ops.triton.device import RUNTIME_NUMBERS, Arithmetic, Shape, chunk_at, scan_of, square_at
from mdn.ops.triton.prepare import join_all_blocks
from mdn.ops.triton.scans import forward_turn, load_states


@triton.jit
def last_output(o, scan, shape, WIDTH: tl.constexpr):
    """The last row [WIDTH] of o [tokens, HV, V] of a sequence; zeros of one that has no tokens."""
    columns = tl.arange(0, WIDTH)
    row = ((scan.begin + scan.length - 1) * shape.HV + scan.head) * shape.V
    return tl.load(o + row + columns, mask=columns < tl.where(scan.length > 0, shape.V, 0), other=0.0)


@triton.jit
def repair_chunk(attend, erase, inverse, gamma_S, slot, C: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr):
    """From the first token on whose key or gates are not finite, rows of erase (6) become zero, those of the inverse
    the identity's, and those of attend (7) NaN, so that outputs do. All above the diagonal becomes zero. The rows
    before are right in the blocks on the diagonal of the inverse, and joining the blocks again makes the others."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    diagonal = slot * (C * C) + tl.arange(0, C) * (C + 1)
    finite = (tl.load(erase + diagonal) + tl.load(gamma_S + diagonal)) * 0.0 == 0.0  # [C], keys and gates
    first = tl.min(tl.where(finite, C, tl.arange(0, C)))
    if first < C:
        tl.debug_barrier()
        at = square_at(erase, slot, C)
        tl.store(at, tl.where((i < first) & (i > j), tl.load(at), 0.0))
        at = square_at(inverse, slot, C)
        tl.store(at, tl.where(i < first, tl.load(at), tl.where(i == j, 1.0, 0.0)))
        at = square_at(attend, slot, C)
        weights = tl.where(i >= j, tl.load(at).to(COMPUTE), 0.0)
        tl.store(at, tl.where(i < first, weights, float("nan")).to(attend.dtype.element_ty))
        join_all_blocks(erase + slot * (C * C), inverse + slot * (C * C), C, False, EXACT, COMPUTE)


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def contain_kernel(
    q,  # [tokens, H, K], as are k and p
    k,
    p,  # or None: k
    v,  # [tokens, HV, V]
    attend,  # [slots, C, C] OPERAND
    erase,  # [slots, C, C] COMPUTE
    inverse,  # [slots, C, C] COMPUTE
    vectors,  # [slots, VECTORS, C] COMPUTE
    gamma_S,  # [slots, C, C] COMPUTE
    initial_state,  # [2, N, HV, K, V], or None: zeros
    o,  # [tokens, HV, V]
    residual,  # [tokens, HV, V], or None
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
    WIDTH: tl.constexpr,  # V padded to a power of two
    PIECE: tl.constexpr,
    PACKED: tl.constexpr,
    REFINE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_WARP: tl.constexpr,
    EXACT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    shape: tl.constexpr = Shape(H=H, HV=HV, K=K, V=V, C=C, BK=BK, BV=BV)
    arithmetic: tl.constexpr = Arithmetic(OPERAND=OPERAND, COMPUTE=COMPUTE, PRECISION=PRECISION, BY_WARP=BY_WARP)
    scan = scan_of(tl.program_id(0), 0, cu_seqlens, time, shape, PACKED)
    if tl.sum(last_output(o, scan, shape, WIDTH).to(COMPUTE) * 0.0) != 0.0:
        chunks = tl.cdiv(scan.length, C)
        for number in range(chunks):
            chunk = chunk_at(scan.begin, scan.length, scan.sequence, number, scan.head, HV, C)
            repair_chunk(attend, erase, inverse, gamma_S, chunk.slot, C, EXACT, COMPUTE)
        tl.debug_barrier()
        X = tl.zeros([BK, 2 * BV], COMPUTE)
        # One loop over tiles and chunks. With one inside the other the compiler keeps pointers of both, and spills.
        for turn in range(chunks * tl.cdiv(V, BV)):
            number = turn % chunks
            tile = scan_of(tl.program_id(0), turn // chunks * BV, cu_seqlens, time, shape, PACKED)
            # A branch around the load would spill: 216 bytes on sm_80 with a pack and initial states.
            X = tl.where(number == 0, load_states(initial_state, tile, sequences, shape, COMPUTE), X)
            X = forward_turn(
                X, q, k, p, v, attend, erase if REFINE else None, inverse, vectors, o, residual, tile, number,
                shape, arithmetic, PIECE, True,
            )  # fmt: skip

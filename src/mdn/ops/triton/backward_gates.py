"""Kernel: gradients of log_alpha, log_mu, beta and eta, one program per (chunk, value head).

gamma_M, gamma_S, abar, b and mbar are made by recurrences along the tokens, so their adjoints are recurrences against
the tokens, with the gates of the token after (16), (17). As in `prepare`, a row [C] is one number per thread. The rows
of the adjoints go to memory; every gate's gradient is then a sum over rows of whole matrices, which a thread reads in
pieces of four neighbours.
"""

import triton
import triton.language as tl

from mdn.ops.triton.device import (
    GATES,
    GRAD_ABAR,
    GRAD_ABAR_BEFORE,
    GRAD_ALPHA_IN_P,
    GRAD_B,
    GRAD_B_BEFORE,
    GRAD_DECAYS,
    GRAD_VECTORS,
    GRAD_WRITE_M,
    GRAD_WRITE_S,
    RUNTIME_NUMBERS,
    VECTORS,
    load_decays,
    load_row_before,
    load_vector,
    locate_chunk,
    recurrence,
    square_at,
    store_gate,
    vector_at,
)
from mdn.ops.triton.prepare import load_gates


@triton.jit
def load_grad_decay(
    grad_vectors, slot, of_end, OF_O: tl.constexpr, OF_TARGET: tl.constexpr, STEP: tl.constexpr, C: tl.constexpr
):
    """The whole gradient [C] of abar or b after each token: through o, through the target of the token that probes with
    it (STEP tokens later), and, of the last one, through the states."""
    rows = tl.arange(0, C)
    total = tl.load(vector_at(grad_vectors, slot, OF_O, GRAD_VECTORS, C))
    total += tl.load(vector_at(grad_vectors, slot, OF_TARGET, GRAD_VECTORS, C) + STEP, mask=rows < C - STEP, other=0.0)
    return total + tl.where(rows == C - 1, of_end, 0.0)


@triton.jit
def adjoint_rows(gates, grad_gamma_S, grad_gamma_M, write_S, write_M, C: tl.constexpr, THREADS: tl.constexpr):
    """(16), from the last token to the first: replaces the rows of grad_gamma_S [C, C] by those that also hold what
    later rows hand back, and writes those of grad_gamma_M [C, C]. write_S, write_M [C]: of the last rows, through the
    states."""
    j = tl.arange(0, C)
    row_S, row_M = write_S, write_M
    for step in range(0, C, 16):
        first = C - 16 - step
        loaded = load_gates(gates + first, 3, C)
        given = ()
        for token in tl.static_range(16):
            given = given + (tl.load(grad_gamma_S + (first + token) * C + j),)  # type: ignore[assignment]  # noqa: RUF005
        if C < THREADS:
            # Several threads hold each number of a row: all have read it before one of them replaces it.
            tl.debug_barrier()
        for back in tl.static_range(16):
            i = first + 15 - back
            alpha, mu, beta = loaded[15 - back]
            row_S += given[15 - back]
            row_M += beta * row_S
            tl.store(grad_gamma_S + i * C + j, row_S)
            tl.store(grad_gamma_M + i * C + j, row_M)
            row_S *= alpha
            row_M *= mu


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def backward_gates_kernel(
    vectors,  # [slots, VECTORS, C] COMPUTE
    gamma_S,  # [slots, C, C] COMPUTE
    gamma_M,  # [slots, C, C] COMPUTE
    grad_gamma_S,  # [slots, C, C] COMPUTE: all but the last row's part in the states; overwritten
    grad_gamma_M,  # [slots, C, C] COMPUTE
    grad_vectors,  # [slots, GRAD_VECTORS, C] COMPUTE
    grad_log_alpha,  # [tokens, HV], as are the others
    grad_log_mu,
    grad_beta,
    grad_eta,
    grad_direct,  # or None
    chunk_indices,  # [chunks, 2]
    cu_seqlens,  # [sequences + 1]
    time,
    HV: tl.constexpr,
    C: tl.constexpr,
    P_TIMES_ALPHA: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    PACKED: tl.constexpr,
    THREADS: tl.constexpr,
):
    chunk, head = locate_chunk(chunk_indices, cu_seqlens, time, HV, HV, C, PACKED)
    slot = chunk.slot
    square = slot * (C * C)
    gates = vectors + (slot * VECTORS + GATES) * C
    write_S = tl.load(vector_at(grad_vectors, slot, GRAD_WRITE_S, GRAD_VECTORS, C))
    write_M = tl.load(vector_at(grad_vectors, slot, GRAD_WRITE_M, GRAD_VECTORS, C))
    adjoint_rows(gates, grad_gamma_S + square, grad_gamma_M + square, write_S, write_M, C, THREADS)
    tl.debug_barrier()

    rows = tl.arange(0, C)
    alpha = load_vector(vectors, slot, GATES, C)
    mu = load_vector(vectors, slot, GATES + 1, C)
    beta = load_vector(vectors, slot, GATES + 2, C)
    of_gamma_S = tl.load(square_at(grad_gamma_S, slot, C))  # [C, C]
    of_gamma_M = tl.load(square_at(grad_gamma_M, slot, C))  # [C, C]
    of_alpha = alpha * tl.sum(of_gamma_S * load_row_before(gamma_S, slot, C), axis=1)
    of_beta = tl.sum(of_gamma_S * tl.load(square_at(gamma_M, slot, C)), axis=1)
    of_mu = mu * tl.sum(of_gamma_M * load_row_before(gamma_M, slot, C), axis=1)
    of_eta = tl.load(grad_gamma_M + square + rows * (C + 1))  # the diagonal
    if grad_direct is not None:
        store_gate(grad_direct, tl.load(grad_gamma_S + square + rows * (C + 1)), chunk, head, HV, C)

    # (17): abar, b and mbar.
    next_alpha = tl.load(gates + rows + 1, mask=rows < C - 1, other=1.0)
    next_mu = tl.load(gates + C + rows + 1, mask=rows < C - 1, other=1.0)
    previous_alpha = tl.load(gates + rows - 1, mask=rows > 0, other=1.0)
    previous_mu = tl.load(gates + C + rows - 1, mask=rows > 0, other=1.0)
    previous_beta = tl.load(gates + 2 * C + rows - 1, mask=rows > 0, other=0.0)
    abar = tl.cumprod(previous_alpha, axis=0)  # [C], before each token
    mbar = tl.cumprod(previous_mu, axis=0)
    b = recurrence(previous_alpha, previous_beta * mbar)
    STEP: tl.constexpr = 0 if LOOKAHEAD else 1
    abar_end, b_end, mbar_end = load_decays(grad_vectors, slot, GRAD_DECAYS, GRAD_VECTORS, C)
    of_abar = load_grad_decay(grad_vectors, slot, abar_end, GRAD_ABAR, GRAD_ABAR_BEFORE, STEP, C)
    of_abar = recurrence(next_alpha, of_abar, REVERSE=True)
    of_b = load_grad_decay(grad_vectors, slot, b_end, GRAD_B, GRAD_B_BEFORE, STEP, C)
    of_b = recurrence(next_alpha, of_b, REVERSE=True)
    of_mbar = recurrence(next_mu, beta * of_b + tl.where(rows == C - 1, mbar_end, 0.0), REVERSE=True)
    of_alpha += alpha * (of_abar * abar + of_b * b)
    of_beta += of_b * (mu * mbar)
    of_mu += mu * of_mbar * mbar
    if P_TIMES_ALPHA:
        of_alpha += tl.load(vector_at(grad_vectors, slot, GRAD_ALPHA_IN_P, GRAD_VECTORS, C))

    store_gate(grad_log_alpha, of_alpha, chunk, head, HV, C)
    store_gate(grad_log_mu, of_mu, chunk, head, HV, C)
    store_gate(grad_beta, of_beta, chunk, head, HV, C)
    store_gate(grad_eta, of_eta, chunk, head, HV, C)

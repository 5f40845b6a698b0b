"""Kernel of one decoding step, one program per (row, value head, tile of V columns).

Gates, L2 norm, update and read-out in one launch; S and M are read once and written once, in place. A small batch is
latency alone: so all loads are issued before the first use, and are in flight together. No tuning and no host
synchronisation, so the step can be captured in a CUDA graph.
"""

import triton
import triton.language as tl

from mdn.ops.triton.device import L2NORM_EPS


@triton.jit
def normalise(vector, L2NORM: tl.constexpr):
    """A vector [BK] of length 1, with L2NORM (18)."""
    if L2NORM:
        vector *= 1.0 / tl.sqrt(tl.sum(vector * vector, axis=0) + L2NORM_EPS)
    return vector


@triton.jit
def update(
    S, M, q_t, k_t, p_t, r_t, log_alpha_t, log_mu_t, beta_t, eta_t, direct_t,
    L2NORM: tl.constexpr, P_TIMES_ALPHA: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """(1): S and M [BK, BV] after the token, and its output [BV] before the scale. r_t [BV] comes as v_t; direct_t is
    None for the rule of the paper."""
    alpha = tl.exp(log_alpha_t)
    p_t = normalise(p_t, L2NORM)
    if P_TIMES_ALPHA:
        p_t *= alpha
    M *= tl.exp(log_mu_t)
    if LOOKAHEAD:
        r_t -= tl.sum((alpha * S - beta_t * M) * p_t[:, None], axis=0)
    else:
        r_t -= tl.sum(S * p_t[:, None], axis=0)
    k_t = normalise(k_t, L2NORM)
    M -= k_t[:, None] * (eta_t * r_t)[None, :]
    S = alpha * S - beta_t * M
    if direct_t is not None:
        S += k_t[:, None] * (direct_t * r_t)[None, :]
    return S, M, tl.sum(S * normalise(q_t, L2NORM)[:, None], axis=0)


@triton.jit(do_not_specialize=["slots"])
def decode_kernel(
    q,  # [B, H, K], as are k and p
    k,
    p,  # or None: k
    v,  # [B, HV, V]
    log_alpha,  # [B, HV], as are all gates
    log_mu,
    beta,
    eta,
    direct,  # or None: 0
    S,  # [slots, HV, K, V] with the strides below, as is M
    M,  # or None: mu is 0
    state_indices,  # [B], or None: row b has slot b
    o,  # [B, HV, V]
    S_slot_stride,
    S_head_stride,
    S_row_stride,
    M_slot_stride,
    M_head_stride,
    M_row_stride,
    slots,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
    P_TIMES_ALPHA: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    TILES: tl.constexpr = (V + BV - 1) // BV
    columns = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    value_row = tl.program_id(0).to(tl.int64) // TILES
    batch = value_row // HV
    head = value_row % HV
    key_row = batch * H + head // (HV // H)
    if state_indices is None:
        slot = batch
    else:
        slot = tl.load(state_indices + batch).to(tl.int64)
    rows = tl.arange(0, BK)
    inside = columns < V
    # The host never reads the slots, so the kernel must not trust them. A row whose slot does not exist touches no
    # state and its output is zero: -1 marks the padding rows of a captured graph.
    exists = (slot >= 0) & (slot < slots)
    mask = (rows < K)[:, None] & (columns < tl.where(exists, V, 0))[None, :]

    S_at = S + slot * S_slot_stride + head * S_head_stride + rows[:, None] * S_row_stride + columns[None, :]
    # Volatile loads stay in this order. The assembler would otherwise begin with the norm of k and issue the loads of
    # the states after it. Triton would load v twice if that were volatile; its load cannot pass the barrier either.
    S_tile = tl.load(S_at, mask=mask, other=0.0, volatile=True).to(COMPUTE)  # [BK, BV]
    if M is None:
        M_tile = tl.zeros_like(S_tile)
    else:
        M_at = M + slot * M_slot_stride + head * M_head_stride + rows[:, None] * M_row_stride + columns[None, :]
        M_tile = tl.load(M_at, mask=mask, other=0.0, volatile=True).to(COMPUTE)  # [BK, BV]
    r_t = tl.load(v + value_row * V + columns, mask=inside, other=0.0).to(COMPUTE)  # [BV]
    log_alpha_t = tl.load(log_alpha + value_row, volatile=True).to(COMPUTE)
    log_mu_t = tl.load(log_mu + value_row, volatile=True).to(COMPUTE)
    beta_t = tl.load(beta + value_row, volatile=True).to(COMPUTE)
    eta_t = tl.load(eta + value_row, volatile=True).to(COMPUTE)
    if direct is None:
        direct_t = None
    else:
        direct_t = tl.load(direct + value_row, volatile=True).to(COMPUTE)
    q_t = tl.load(q + key_row * K + rows, mask=rows < K, other=0.0, volatile=True).to(COMPUTE)  # [BK]
    tl.debug_barrier()
    k_t = tl.load(k + key_row * K + rows, mask=rows < K, other=0.0, volatile=True).to(COMPUTE)  # [BK]
    if p is None:
        p_t = k_t
    else:
        p_t = tl.load(p + key_row * K + rows, mask=rows < K, other=0.0, volatile=True).to(COMPUTE)  # [BK]

    S_tile, M_tile, o_t = update(
        S_tile, M_tile, q_t, k_t, p_t, r_t, log_alpha_t, log_mu_t, beta_t, eta_t, direct_t,
        L2NORM, P_TIMES_ALPHA, LOOKAHEAD,
    )  # fmt: skip
    o_t *= scale
    tl.store(S_at, S_tile.to(S.dtype.element_ty), mask=mask)
    if M is not None:
        tl.store(M_at, M_tile.to(M.dtype.element_ty), mask=mask)
    tl.store(o + value_row * V + columns, tl.where(exists, o_t, 0.0).to(o.dtype.element_ty), mask=inside)

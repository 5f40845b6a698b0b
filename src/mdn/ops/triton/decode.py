"""Kernel and launcher of one decoding step, one program per (row, value head, tile of V columns).

Gates, L2 norm, update and read-out in one launch; S and M [slots, HV, K, V] are read once and written once, in place.
No tuning and no host synchronisation, so the step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState
from mdn.ops.triton.availability import why_unsupported
from mdn.ops.triton.blocks import L2NORM_EPS
from mdn.ops.triton.launcher import launch
from mdn.ops.triton.tiles import choose_tile, power_of_two, target_of


@triton.jit
def load_vector(tensor, row, K: tl.constexpr, BK: tl.constexpr, L2NORM: tl.constexpr, COMPUTE: tl.constexpr):
    """Row ``row`` of a [rows, K] tensor, normalised if asked for."""
    columns = tl.arange(0, BK)
    vector = tl.load(tensor + row * K + columns, mask=columns < K, other=0.0).to(COMPUTE)
    if L2NORM:
        vector *= 1.0 / tl.sqrt(tl.sum(vector * vector, axis=0) + L2NORM_EPS)
    return vector


@triton.jit(do_not_specialize=["slots"])
def decode_kernel(
    q,
    k,
    p,
    v,
    log_alpha,
    log_mu,
    beta,
    eta,
    S,
    M,
    state_indices,
    o,
    s_slot_stride,
    s_head_stride,
    s_row_stride,
    m_slot_stride,
    m_head_stride,
    m_row_stride,
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
    COMPUTE: tl.constexpr,
):
    value_row = tl.program_id(0).to(tl.int64)
    batch = value_row // HV
    head = value_row % HV
    key_row = batch * H + head // (HV // H)
    if state_indices is None:
        slot = batch
    else:
        slot = tl.load(state_indices + batch).to(tl.int64)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    rows = tl.arange(0, BK)
    inside = columns < V
    # The host never reads the slots, so the kernel must not trust them. A row whose slot does not exist touches no
    # state and its output is zero: -1 marks the padding rows of a captured graph.
    exists = (slot >= 0) & (slot < slots)
    mask = (rows < K)[:, None] & (columns < tl.where(exists, V, 0))[None, :]

    s_pointers = S + slot * s_slot_stride + head * s_head_stride + rows[:, None] * s_row_stride + columns[None, :]
    m_pointers = M + slot * m_slot_stride + head * m_head_stride + rows[:, None] * m_row_stride + columns[None, :]
    s = tl.load(s_pointers, mask=mask, other=0.0).to(COMPUTE)
    m = tl.load(m_pointers, mask=mask, other=0.0).to(COMPUTE)

    alpha = tl.exp(tl.load(log_alpha + value_row).to(COMPUTE))
    key = load_vector(k, key_row, K, BK, L2NORM, COMPUTE)
    if p is None:
        probe = key
    else:
        probe = load_vector(p, key_row, K, BK, L2NORM, COMPUTE)
    if P_TIMES_ALPHA:
        probe = probe * alpha
    error = tl.load(v + value_row * V + columns, mask=inside, other=0.0).to(COMPUTE)
    error -= tl.sum(s * probe[:, None], axis=0)
    write = key * tl.load(eta + value_row).to(COMPUTE)
    m = tl.exp(tl.load(log_mu + value_row).to(COMPUTE)) * m - write[:, None] * error[None, :]
    s = alpha * s - tl.load(beta + value_row).to(COMPUTE) * m
    tl.store(s_pointers, s.to(S.dtype.element_ty), mask=mask)
    tl.store(m_pointers, m.to(M.dtype.element_ty), mask=mask)

    query = load_vector(q, key_row, K, BK, L2NORM, COMPUTE) * scale
    out = tl.where(exists, tl.sum(s * query[:, None], axis=0), 0.0)
    tl.store(o + value_row * V + columns, out.to(o.dtype.element_ty), mask=inside)


def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
    """One token of every row; updates S and M in place and returns o [B, HV, V].

    Rows whose slot lies outside S and M are skipped: no state changes and their o is zero.
    """
    q, v = tensors.q, tensors.v
    reason = why_unsupported(q, v)
    if reason is not None:
        raise ValueError(reason)
    for name, x in (("S", state.S), ("M", state.M)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")
    batch, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    o = torch.empty(batch, value_heads, value_dim, dtype=v.dtype, device=v.device)
    tile = choose_tile("decode", key_dim, value_dim, state.S.element_size(), target_of(q.device))
    arguments: dict[str, Any] = {name: None if x is None else x.contiguous() for name, x in tensors._asdict().items()}
    arguments |= state._asdict() | {"slots": state.S.shape[0], "o": o, "scale": options.scale}
    arguments |= zip(("s_slot_stride", "s_head_stride", "s_row_stride"), state.S.stride()[:3])
    arguments |= zip(("m_slot_stride", "m_head_stride", "m_row_stride"), state.M.stride()[:3])
    arguments |= {"H": heads, "HV": value_heads, "K": key_dim, "V": value_dim}
    arguments |= {"BK": power_of_two(key_dim), "BV": tile.value_block}
    arguments |= {"L2NORM": options.l2norm, "P_TIMES_ALPHA": options.p_times_alpha}
    arguments |= {"COMPUTE": tl.float64 if q.dtype == torch.float64 else tl.float32}
    launch(decode_kernel, (batch * value_heads, triton.cdiv(value_dim, tile.value_block)), tile, arguments)
    return o

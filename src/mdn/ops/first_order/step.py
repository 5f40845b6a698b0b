"""One token of any first-order rule, for decoding: the state is updated in place.

    x = S^T read;   S <- decay * S + k v^T + write x^T;   o = scale * S^T q

q, k, read, write `[B, H or HV, K]`, v `[B, HV, V]`, decay `[B, HV, K or 1]`, state `[slots, HV, K, V]`. Without `write`
the delta form is meant, k (v - x)^T; without `read` there is no x. `state_indices` `[B]` names the slot of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.ops.l2norm import l2norm
from mdn.ops.momentum_delta_rule.options import RuleOptions

from .backend import choose_backend, native_kernel


@torch.no_grad()
def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    read: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """Outputs `[B, HV, V]` in the dtype of v."""
    batch, heads, width = v.shape
    if state_indices is None and state.shape != (batch, heads, k.shape[-1], width):
        expected = [batch, heads, k.shape[-1], width]
        raise ValueError(f"state must have shape {expected} (or state_indices be given), got {list(state.shape)}")
    in_place = state_indices is None and state.is_contiguous()
    current = state if state_indices is None else state[state_indices]
    current = current.contiguous().view(batch * heads, k.shape[-1], width)
    query, key = _rows(q, heads, current.dtype), _rows(k, heads, current.dtype)
    value = v.to(current.dtype).reshape(-1, 1, width)
    found = None if read is None else _rows(read, heads, current.dtype) @ current
    current.mul_(decay.to(current.dtype).reshape(batch * heads, -1, 1))
    if found is not None and write is None:
        value = value - found
    current.baddbmm_(key.transpose(1, 2), value)
    if found is not None and write is not None:
        current.baddbmm_(_rows(write, heads, current.dtype).transpose(1, 2), found)
    output = (query @ current) * (k.shape[-1] ** -0.5 if scale is None else scale)
    if state_indices is not None:
        state.index_copy_(0, state_indices, current.view(batch, *state.shape[1:]))
    elif not in_place:
        state.copy_(current.view(state.shape))
    return output.view(batch, heads, width).to(v.dtype)


def scalar_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    scale: float | None,
    normalise: bool,
    state_indices: Tensor | None,
    read_decayed: bool = False,
    erase: bool = True,
) -> Tensor:
    """A scalar-decay rule: p None is k, g None no decay, beta None ones; `erase=False` subtracts nothing from v."""
    if state.dtype == torch.float32 and choose_backend(v, "auto") == "cpu":
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        options = RuleOptions(scale=scale, l2norm=normalise, p_times_alpha=read_decayed)
        return native_kernel().first_order_step_(q, k, v, p, g, beta, state, state_indices, options, erase=erase)
    q, k, p = q.to(state.dtype), k.to(state.dtype), None if p is None else p.to(state.dtype)
    if normalise:
        q, k, p = l2norm(q), l2norm(k), None if p is None else l2norm(p)
    heads = v.shape[1]
    decay = k.new_ones(*v.shape[:2], 1) if g is None else g.to(state.dtype).exp().unsqueeze(-1)
    read = None
    if erase:
        read = _heads(k if p is None else p, heads)
        read = decay * read if read_decayed else read
    if beta is not None:
        k = beta.to(state.dtype).unsqueeze(-1) * _heads(k, heads)
    return step_(q, k, v, decay, state, read, scale=scale, state_indices=state_indices)


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[B, H, K]` to `[B, heads, K]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _rows(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[B, H, K]` to `[B * heads, 1, K]`."""
    return _heads(x, heads).to(dtype).reshape(-1, 1, x.shape[-1])

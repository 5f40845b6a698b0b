"""Scalar decay: S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t.

This is FLA's "simple GLA" and the state update of Mamba2 (q = C, k = B, v = dt x, g = dt A); with `g_gamma`, RetNet's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .inputs import prepare
from .recurrence import recurrent_scalar_decay
from .scalar_decay import chunk_scalar_decay
from .step import scalar_step_


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    chunk_size: int = 64,
    backend: str = "auto",
    **hints: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; g is `[B, T, HV]`, or g_gamma `[HV]` for a constant decay, or neither for none."""
    check_hints(hints)
    backend = choose_backend(q, backend)
    if backend == "fla":
        tensors = {"q": q, "k": k, "v": v, "g": g, "g_gamma": g_gamma}
        state = initial_state, output_final_state, cu_seqlens
        return call_fla("simple_gla", tensors, scale, *state, state_v_first=state_v_first, **hints)
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, state_v_first=state_v_first)
    log_decay = inputs.log_decay("g", _one_gate(g, g_gamma, v))
    output = chunk_scalar_decay(inputs, None, log_decay, inputs.gate("beta", None, 1.0), chunk_size, backend)
    return inputs.finish(*output, output_final_state)


def recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, state_v_first=state_v_first)
    log_decay = inputs.log_decay("g", _one_gate(g, g_gamma, v))
    output = recurrent_scalar_decay(inputs, None, log_decay, inputs.gate("beta", None, 1.0))
    return inputs.finish(*output, output_final_state)


def simple_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]` and g `[B, HV]`; `state` `[slots, HV, K, V]` is updated in place."""
    return scalar_step_(q, k, v, None, g, None, state, scale, False, state_indices, erase=False)


def _one_gate(g: Tensor | None, g_gamma: Tensor | None, v: Tensor) -> Tensor | None:
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma must not be given together: one decays by token, the other by a constant")
    if g_gamma is None:
        return g
    if g_gamma.shape != (v.shape[2],):
        raise ValueError(f"g_gamma must have shape [{v.shape[2]}], got {list(g_gamma.shape)}")
    return g_gamma.to(torch.promote_types(g_gamma.dtype, torch.float32)).expand(v.shape[:3])

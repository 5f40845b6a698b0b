"""Gated linear attention: S_t = diag(exp g_t) S_{t-1} + k_t v_t^T, a decay for every key dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .inputs import prepare
from .recurrence import recurrent_vector_decay
from .step import step_
from .vector_decay import chunk_vector_decay


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
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
    """Outputs `[B, T, HV, V]`; g is `[B, T, HV, K]`, logarithms."""
    check_hints(hints)
    if choose_backend(q, backend, native=False) == "fla":
        state = initial_state, output_final_state, cu_seqlens
        return call_fla("gla", {"q": q, "k": k, "v": v, "g": g}, scale, *state, state_v_first=state_v_first, **hints)
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, state_v_first=state_v_first)
    output = chunk_vector_decay(inputs, inputs.log_decay("g", g, vector=True), None, None, chunk_size)
    return inputs.finish(*output, output_final_state)


def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, state_v_first=state_v_first)
    output = recurrent_vector_decay(inputs, inputs.log_decay("g", g, vector=True), None, None)
    return inputs.finish(*output, output_final_state)


def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]` and g `[B, HV, K]`; `state` `[slots, HV, K, V]` is updated in place."""
    return step_(q, k, v, g.to(state.dtype).exp(), state, scale=scale, state_indices=state_indices)

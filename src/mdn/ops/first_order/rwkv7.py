"""RWKV-7: S_t = diag(exp w_t) S_{t-1} + k_t v_t^T + b_t (S_{t-1}^T a_t)^T, read by the receptance r_t.

The layer passes a = -kappa and b = kappa * (in-context learning rate) with a unit kappa.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .inputs import prepare
from .recurrence import recurrent_vector_decay
from .step import step_
from .vector_decay import chunk_vector_decay


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    chunk_size: int = 64,
    backend: str = "auto",
    **hints: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; r, k `[B, T, H, K]`, a, b and w (logarithms) `[B, T, HV, K]`."""
    check_hints(hints)
    if choose_backend(r, backend, native=False) == "fla":
        tensors = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
        return call_fla("rwkv7", tensors, scale, initial_state, output_final_state, cu_seqlens, **hints)
    inputs = prepare(r, k, v, scale, initial_state, cu_seqlens)
    gates = inputs.log_decay("w", w, vector=True), inputs.key("a", a), inputs.key("b", b)
    return inputs.finish(*chunk_vector_decay(inputs, *gates, chunk_size), output_final_state)


def recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(r, k, v, scale, initial_state, cu_seqlens)
    gates = inputs.log_decay("w", w, vector=True), inputs.key("a", a), inputs.key("b", b)
    return inputs.finish(*recurrent_vector_decay(inputs, *gates), output_final_state)


def rwkv7_step(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]`; `state` `[slots, HV, K, V]` is updated in place."""
    return step_(r, k, v, w.to(state.dtype).exp(), state, a, b, scale, state_indices)

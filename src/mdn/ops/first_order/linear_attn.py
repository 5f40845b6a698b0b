"""Vanilla linear attention: S_t = S_{t-1} + k_t v_t^T. It is simple GLA without decay.

Normalised, o_t is divided by q_t . z_t with z_t = k_1 + ... + k_t. z is the state of one more value, constantly one, so
it is carried as one more column and needs no code of its own. The state is then (S `[N, H, K, V]`, z `[N, 1, H, K]`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .inputs import expand_heads
from .simple_gla import chunk_simple_gla, recurrent_simple_gla
from .step import scalar_step_, step_

State = Tensor | tuple[Tensor, Tensor]
EPSILON = 1e-10


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    chunk_size: int = 64,
    backend: str = "auto",
    **hints: Any,
) -> tuple[Tensor, State | None]:
    """Outputs `[B, T, HV, V]` and, if asked for, the final state."""
    check_hints(hints)
    backend = choose_backend(q, backend)
    if backend == "fla":
        state = initial_state, output_final_state, cu_seqlens
        o, final = call_fla("linear_attn", {"q": q, "k": k, "v": v}, scale, *state, normalize=normalize, **hints)
        return o, final if output_final_state else None

    def rule(q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "backend": backend}
        return chunk_simple_gla(q, k, v, None, None, scale, initial, output_final_state, **options)

    return _normalised(rule, q, k, v, initial_state) if normalize else rule(q, k, v, _tensor(initial_state))


def recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, State | None]:
    """The definition, token by token."""

    def rule(q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return recurrent_simple_gla(q, k, v, None, None, scale, initial, output_final_state, cu_seqlens=cu_seqlens)

    return _normalised(rule, q, k, v, initial_state) if normalize else rule(q, k, v, _tensor(initial_state))


def linear_attn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    z_state: Tensor | None = None,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]`; `state` `[slots, HV, K, V]` (and `z_state` `[slots, HV, K]`) change in place."""
    output = scalar_step_(q, k, v, None, None, None, state, scale, False, state_indices, erase=False)
    if z_state is None:
        return output
    ones = z_state.new_ones(*v.shape[:2], 1)
    normaliser = step_(q, k, ones, ones, z_state.unsqueeze(-1), scale=scale, state_indices=state_indices)
    return (output / (normaliser + EPSILON)).to(v.dtype)


def _normalised(
    rule: Callable[..., tuple[Tensor, Tensor | None]], q: Tensor, k: Tensor, v: Tensor, initial_state: State | None
) -> tuple[Tensor, State | None]:
    dtype = torch.promote_types(v.dtype, torch.float32)
    values = torch.cat([v.to(dtype), v.new_ones(*v.shape[:-1], 1, dtype=dtype)], -1)
    initial = None
    if isinstance(initial_state, tuple):
        state, z = initial_state
        z = expand_heads(z, v.shape[2])[:, 0].unsqueeze(-1)
        initial = torch.cat([state, z.to(state.dtype)], -1)
    elif initial_state is not None:
        initial = torch.cat([initial_state, torch.zeros_like(initial_state[..., :1])], -1)
    output, final = rule(q, k, values, initial)
    output = output[..., :-1] / (output[..., -1:] + EPSILON)
    return output.to(v.dtype), None if final is None else (final[..., :-1], final[..., -1].unsqueeze(1))


def _tensor(state: State | None) -> Tensor | None:
    if isinstance(state, tuple):
        raise ValueError(
            "initial_state must be a tensor when normalize=False, got a tuple (the state with its normaliser)"
        )
    return state

"""The delta rule: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T. It is the gated delta rule without decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .gated_delta_rule import chunk_gated_delta_rule, gated_delta_rule_step, recurrent_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    chunk_size: int = 64,
    backend: str = "auto",
    **hints: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; beta is `[B, T, HV]`."""
    check_hints(hints)
    backend = choose_backend(q, backend)
    if backend == "fla":
        before = scale, initial_state, output_final_state, cu_seqlens
        tensors = {"q": q, "k": k, "v": v, "beta": beta}
        return call_fla("delta_rule", tensors, *before, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **hints)
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "backend": backend}
    state = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return chunk_gated_delta_rule(q, k, v, None, beta, scale, *state, **options)


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return recurrent_gated_delta_rule(q, k, v, None, beta, scale, *options)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]`, beta `[B, HV]`; `state` `[slots, HV, K, V]` is updated in place."""
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_indices": state_indices}
    return gated_delta_rule_step(q, k, v, None, beta, state, scale=scale, **options)

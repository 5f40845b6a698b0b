"""Comba: a gated delta rule that reads its error along p instead of k.

S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T. The error is read before the decay, as in FLA's kernels
(FLA's naive_recurrent_comba reads it after the decay). The layer corrects the query, q - d k, before the rule.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .inputs import Inputs, prepare
from .recurrence import recurrent_scalar_decay
from .scalar_decay import chunk_scalar_decay
from .step import scalar_step_


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None = None,
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
    """Outputs `[B, T, HV, V]`; p `[B, T, H, K]` (None: k), g and beta `[B, T, HV]` (None: no decay, ones)."""
    check_hints(hints)
    backend = choose_backend(q, backend)
    if backend == "fla":
        tensors = {"q": q, "k": k, "v": v, "p": k if p is None else p}
        tensors["g"] = v.new_zeros(v.shape[:3]) if g is None else g
        tensors["beta"] = v.new_ones(v.shape[:3]) if beta is None else beta
        state = initial_state, output_final_state, cu_seqlens
        return call_fla("comba", tensors, scale, *state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **hints)
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return inputs.finish(
        *chunk_scalar_decay(inputs, *closed_loop(inputs, p, g, beta), chunk_size, backend), output_final_state
    )


def recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return inputs.finish(*recurrent_scalar_decay(inputs, *closed_loop(inputs, p, g, beta)), output_final_state)


def comba_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]`, gates `[B, HV]`; `state` `[slots, HV, K, V]` is updated in place."""
    return scalar_step_(q, k, v, p, g, beta, state, scale, use_qk_l2norm_in_kernel, state_indices)


def closed_loop(
    inputs: Inputs, p: Tensor | None, g: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the scalar-decay core wants: p (None: k itself), log decays, writing strengths."""
    return (
        inputs.k if p is None else inputs.key("p", p),
        inputs.log_decay("g", g),
        inputs.gate("beta", beta, 1.0),
    )

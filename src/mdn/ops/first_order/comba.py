"""Comba: a gated delta rule that reads its error along p instead of k.

S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T. The error is read before the decay, as in FLA's kernels
(FLA's naive_recurrent_comba reads it after the decay). The layer corrects the query, q - d k, before the rule.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.l2norm import l2norm

from .backend import call_fla, choose_backend
from .inputs import expand_heads, prepare
from .recurrence import recurrent_scalar_decay
from .scalar_decay import chunk_scalar_decay
from .step import step_


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
    state_v_first: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; p `[B, T, H, K]` (None: k), g and beta `[B, T, HV]` (None: no decay, ones)."""
    backend = choose_backend(q, backend)
    if backend == "fla":
        state: dict[str, Any] = {"initial_state": initial_state, "output_final_state": output_final_state}
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return call_fla("comba", "chunk_comba", q, k, v, k if p is None else p, g, beta, scale, **state, **options)
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first)
    errors_along = inputs.k if p is None else inputs.key("p", p)
    gates = inputs.log_decay("g", g), inputs.gate("beta", beta, 1.0)
    output = chunk_scalar_decay(inputs, errors_along, *gates, chunk_size, backend)
    return inputs.finish(*output, output_final_state)


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
    *,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first)
    errors_along = inputs.k if p is None else inputs.key("p", p)
    output = recurrent_scalar_decay(inputs, errors_along, inputs.log_decay("g", g), inputs.gate("beta", beta, 1.0))
    return inputs.finish(*output, output_final_state)


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
    heads, dtype = v.shape[1], state.dtype
    q, k, p = q.to(dtype), k.to(dtype), None if p is None else p.to(dtype)
    if use_qk_l2norm_in_kernel:
        q, k, p = l2norm(q), l2norm(k), None if p is None else l2norm(p)
    decay = k.new_ones(*v.shape[:2], 1) if g is None else g.to(dtype).exp().unsqueeze(-1)
    read = k if p is None else p
    if beta is not None:
        k = beta.to(dtype).unsqueeze(-1) * expand_heads(k.unsqueeze(1), heads)[:, 0]
    return step_(q, k, v, decay, state, read, scale=scale, state_indices=state_indices)

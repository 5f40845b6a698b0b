"""Kimi delta attention: the gated delta rule with a decay for every key dimension.

S_t = D S_{t-1} + beta_t k_t (v_t - (D S_{t-1})^T k_t)^T with D = diag(exp g_t).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.l2norm import l2norm

from .backend import call_fla, check_hints, choose_backend
from .gates import log_decay_from, writing_strength
from .inputs import Inputs, expand_heads, prepare
from .recurrence import recurrent_vector_decay
from .step import step_
from .vector_decay import chunk_vector_decay


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
    **hints: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; g is `[B, T, HV, K]` and beta `[B, T, HV]`.

    With `use_gate_in_kernel` g is raw: the decay is -exp(A_log) softplus(g + dt_bias), or with `lower_bound`
    lower_bound sigmoid(exp(A_log) (g + dt_bias)). With `use_beta_sigmoid_in_kernel` beta is raw too.
    """
    if use_gate_in_kernel:
        g = log_decay_from(g, A_log, dt_bias, lower_bound, vector=True)
    strength = writing_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_hints(hints)
    if choose_backend(q, backend, native=False) == "fla":
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": strength}
        state = initial_state, output_final_state, cu_seqlens
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": state_v_first}
        return call_fla("kda", tensors, scale, *state, **options | hints)
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first)
    output = chunk_vector_decay(*_as_low_rank(inputs, g, strength), chunk_size)
    return inputs.finish(*output, output_final_state)


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return inputs.finish(*recurrent_vector_decay(*_as_low_rank(inputs, g, beta)), output_final_state)


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]`, g `[B, HV, K]`, beta `[B, HV]`; `state` `[slots, HV, K, V]` is updated in place."""
    q, k = q.to(state.dtype), k.to(state.dtype)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    k = expand_heads(k.unsqueeze(1), v.shape[1])[:, 0]
    decay = g.to(state.dtype).exp()
    write = beta.to(state.dtype).unsqueeze(-1) * k
    return step_(q, write, v, decay, state, decay * k, scale=scale, state_indices=state_indices)


def _as_low_rank(inputs: Inputs, g: Tensor, beta: Tensor | None) -> tuple[Inputs, Tensor, Tensor, None]:
    """The decayed state is read along k: the same as reading the state before its decay along exp(g) k."""
    log_decay = inputs.log_decay("g", g, vector=True)
    strength = inputs.gate("beta", beta, 1.0).unsqueeze(-1)
    return inputs.with_keys(strength * inputs.k), log_decay, log_decay.exp() * inputs.k, None

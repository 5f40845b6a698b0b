"""The gated delta rule: S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T.

It is Comba with p_t = exp(g_t) k_t.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.l2norm import l2norm

from .backend import call_fla, choose_backend
from .comba import chunk_comba, comba_step, recurrent_comba
from .gates import log_decay_from, writing_strength
from .inputs import Inputs, expand_heads, prepare


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; g and beta are `[B, T, HV]` (None: no decay, ones).

    With `use_gate_in_kernel` g is raw and the decay -exp(A_log) softplus(g + dt_bias). With
    `use_beta_sigmoid_in_kernel` beta is raw and goes through a sigmoid, doubled by `allow_neg_eigval`.
    """
    if use_gate_in_kernel and g is not None:
        g = log_decay_from(g, A_log, dt_bias)
    strength = writing_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    backend = choose_backend(q, backend)
    if backend == "fla":
        state: dict[str, Any] = {"initial_state": initial_state, "output_final_state": output_final_state}
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": state_v_first}
        function = "chunk_gated_delta_rule"
        return call_fla(
            "gated_delta_rule", function, q, k, v, g, strength, scale, cu_seqlens=cu_seqlens, **state, **options
        )
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first)
    output, final = chunk_comba(*_as_comba(inputs, g, strength), chunk_size=chunk_size, backend=backend)
    return inputs.finish(output, final, output_final_state)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The definition, token by token."""
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return inputs.finish(*recurrent_comba(*_as_comba(inputs, g, beta)), output_final_state)


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One token, `[B, H, D]`, gates `[B, HV]`; `state` `[slots, HV, K, V]` is updated in place."""
    q, k = q.to(state.dtype), k.to(state.dtype)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    p = k
    if g is not None:
        p = g.to(state.dtype).exp().unsqueeze(-1) * expand_heads(k.unsqueeze(1), v.shape[1])[:, 0]
    return comba_step(q, k, v, p, g, beta, state, scale=scale, state_indices=state_indices)


def _as_comba(inputs: Inputs, g: Tensor | None, beta: Tensor | None) -> tuple:
    """Comba's positional arguments, from q, k, v that are already normalised and scaled, with the final state."""
    log_decay, strength = inputs.log_decay("g", g), inputs.gate("beta", beta, 1.0)
    p = log_decay.exp().unsqueeze(-1) * inputs.k
    state = inputs.initial_state, True, False, inputs.boundaries
    return inputs.q, inputs.k, inputs.v, p, log_decay, strength, 1.0, *state

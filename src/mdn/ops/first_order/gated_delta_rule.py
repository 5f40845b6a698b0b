"""The gated delta rule: S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T.

It is Comba with p_t = k_t, read at the decayed state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

from .backend import call_fla, check_hints, choose_backend
from .comba import closed_loop
from .gates import log_decay_from, writing_strength
from .inputs import prepare
from .recurrence import recurrent_scalar_decay
from .scalar_decay import chunk_scalar_decay
from .step import scalar_step_


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
    **hints: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]`; g and beta are `[B, T, HV]` (None: no decay, ones).

    With `use_gate_in_kernel` g is raw and the decay -exp(A_log) softplus(g + dt_bias). With
    `use_beta_sigmoid_in_kernel` beta is raw and goes through a sigmoid, doubled by `allow_neg_eigval`.
    """
    if use_gate_in_kernel and g is not None:
        g = log_decay_from(g, A_log, dt_bias)
    strength = writing_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_hints(hints)
    backend = choose_backend(q, backend)
    if backend == "fla":
        tensors = {"q": q, "k": k, "v": v, "g": v.new_zeros(v.shape[:3]) if g is None else g, "beta": strength}
        state = initial_state, output_final_state, cu_seqlens
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": state_v_first}
        return call_fla("gated_delta_rule", tensors, scale, *state, **options | hints)
    inputs = prepare(q, k, v, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first)
    loop = closed_loop(inputs, None, g, strength)
    output = chunk_scalar_decay(inputs, *loop, chunk_size, backend, read_decayed=True)
    return inputs.finish(*output, output_final_state)


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
    output = recurrent_scalar_decay(inputs, *closed_loop(inputs, None, g, beta), read_decayed=True)
    return inputs.finish(*output, output_final_state)


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
    options = scale, use_qk_l2norm_in_kernel, state_indices
    return scalar_step_(q, k, v, None, g, beta, state, *options, read_decayed=True)

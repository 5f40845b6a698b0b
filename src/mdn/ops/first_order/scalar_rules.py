"""Rules with one decay per head: simple GLA, the delta rule, the gated delta rule, Comba.

All are S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T, o_t = scale * S_t^T q_t, with alpha = exp(g):

| rule | alpha | beta | p |
|---|---|---|---|
| linear attention (`linear_attention`) | 1 | 1 | 0 |
| simple GLA (Mamba2's state update, RetNet) | exp(g) | 1 | 0 |
| delta rule | 1 | beta | k |
| gated delta rule | exp(g) | beta | alpha k: the error is taken at the decayed state |
| Comba | exp(g) | beta | p: the error is taken before the decay, as in FLA's kernels |

Shapes: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, gates ``[B, T, HV]``, states ``[N, HV, K, V]``; one token has no T.
Names, order and defaults are FLA's. ``chunk_*`` are for training and prompts, ``recurrent_*`` are the definitions, and
``*_step`` update the state in place and return o ``[B, HV, V]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order import inputs
from mdn.ops.first_order.gates import RawGates
from mdn.ops.first_order.inputs import FirstOrderOutput, FirstOrderTensors
from mdn.ops.first_order.rule import Rule, SharedArguments
from mdn.ops.shared_checks import check_floating

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

QKV = {"q": "q", "k": "k", "v": "v"}
SIMPLE_GLA = Rule(
    "simple_gla", QKV | {"log_alpha": "g"}, optional=("log_alpha",), erases=False, fla_options=("state_v_first",)
)
DELTA_RULE = Rule("delta_rule", QKV | {"beta": "beta"}, fla_options=("use_qk_l2norm_in_kernel",))
GATED_DELTA_RULE = Rule(
    "gated_delta_rule",
    QKV | {"log_alpha": "g", "beta": "beta"},
    optional=("log_alpha", "beta"),
    p_times_alpha=True,
    fla_options=("use_qk_l2norm_in_kernel", "state_v_first"),
    fla_shares_keys=True,
)
COMBA = Rule(
    "comba",
    QKV | {"p": "p", "log_alpha": "g", "beta": "beta"},
    optional=("p", "log_alpha", "beta"),
    fla_options=("use_qk_l2norm_in_kernel",),
    fla_shares_keys=True,
)

# --------------------------------------------------------------------------------------------------------- simple GLA


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T: FLA's "simple GLA" and Mamba2's state update (q = C, k = B, v = dt x,
    g = dt A).

    g is ``[B, T, HV]``, or ``g_gamma`` ``[HV]`` for a constant decay (RetNet), or neither for none.
    """
    shared = SharedArguments(
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        state_v_first=state_v_first,
        context_parallel=context_parallel,
        check_gates=check_gates,
    )
    tensors = _with_decay(FirstOrderTensors(q, k, v, log_alpha=g), g_gamma)
    return SIMPLE_GLA.chunk(tensors, shared, chunk_size, backend, hints)


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
) -> FirstOrderOutput:
    """The definition of ``chunk_simple_gla``, token by token."""
    shared = SharedArguments(scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return SIMPLE_GLA.recurrent(_with_decay(FirstOrderTensors(q, k, v, log_alpha=g), g_gamma), shared)


def simple_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    tensors = FirstOrderTensors(q, k, v, log_alpha=g)
    return SIMPLE_GLA.step(tensors, state, scale, state_indices, backend, check_gates)


def _with_decay(tensors: FirstOrderTensors, g_gamma: Tensor | None) -> FirstOrderTensors:
    """The tensors as they are, or with the constant decay at every token."""
    if g_gamma is None:
        return tensors
    if tensors.log_alpha is not None:
        raise ValueError("g and g_gamma must not be given together: one decays by token, the other by a constant")
    SIMPLE_GLA.check(tensors, scale=None)
    check_floating("g_gamma", g_gamma)
    inputs.check_shape("g_gamma", g_gamma, tensors.v.shape[2:3])
    decay = g_gamma.to(torch.promote_types(g_gamma.dtype, torch.float32)).expand(tensors.v.shape[:3])
    return tensors._replace(log_alpha=decay)


# ---------------------------------------------------------------------------------------------------------- delta rule


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T."""
    shared = SharedArguments(
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        context_parallel=context_parallel,
        check_gates=check_gates,
    )
    return DELTA_RULE.chunk(FirstOrderTensors(q, k, v, beta=beta), shared, chunk_size, backend, hints)


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
) -> FirstOrderOutput:
    """The definition of ``chunk_delta_rule``, token by token."""
    shared = SharedArguments(scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return DELTA_RULE.recurrent(FirstOrderTensors(q, k, v, beta=beta), shared)


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
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    tensors = FirstOrderTensors(q, k, v, beta=beta)
    return DELTA_RULE.step(tensors, state, scale, state_indices, backend, check_gates, use_qk_l2norm_in_kernel)


# ---------------------------------------------------------------------------------------------------- gated delta rule


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T; None means no decay, and beta = 1.

    With ``use_gate_in_kernel`` g is raw and the decay -exp(A_log) softplus(g + dt_bias). With
    ``use_beta_sigmoid_in_kernel`` beta is raw and goes through a sigmoid, doubled by ``allow_neg_eigval``.
    """
    raw = RawGates(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tensors = GATED_DELTA_RULE.with_gates(FirstOrderTensors(q, k, v, log_alpha=g, beta=beta), raw)
    shared = SharedArguments(
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        state_v_first,
        context_parallel=context_parallel,
        check_gates=check_gates,
    )
    return GATED_DELTA_RULE.chunk(tensors, shared, chunk_size, backend, hints)


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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> FirstOrderOutput:
    """The definition of ``chunk_gated_delta_rule``, token by token."""
    raw = RawGates(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tensors = GATED_DELTA_RULE.with_gates(FirstOrderTensors(q, k, v, log_alpha=g, beta=beta), raw)
    shared = SharedArguments(
        scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first
    )
    return GATED_DELTA_RULE.recurrent(tensors, shared)


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
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    tensors = FirstOrderTensors(q, k, v, log_alpha=g, beta=beta)
    return GATED_DELTA_RULE.step(tensors, state, scale, state_indices, backend, check_gates, use_qk_l2norm_in_kernel)


# --------------------------------------------------------------------------------------------------------------- Comba


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T; None means p = k, no decay, and beta = 1.

    p is ``[B, T, H, K]``. The error is taken before the decay, as in FLA's kernels (FLA's naive_recurrent_comba takes
    it after the decay). The layer corrects the query, q - d k, before the rule.
    """
    shared = SharedArguments(
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        context_parallel=context_parallel,
        check_gates=check_gates,
    )
    return COMBA.chunk(FirstOrderTensors(q, k, v, p, g, beta), shared, chunk_size, backend, hints)


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
) -> FirstOrderOutput:
    """The definition of ``chunk_comba``, token by token."""
    shared = SharedArguments(scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return COMBA.recurrent(FirstOrderTensors(q, k, v, p, g, beta), shared)


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
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    tensors = FirstOrderTensors(q, k, v, p, g, beta)
    return COMBA.step(tensors, state, scale, state_indices, backend, check_gates, use_qk_l2norm_in_kernel)

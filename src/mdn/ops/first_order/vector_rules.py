"""Rules with a decay for every key dimension: gated linear attention, Kimi delta attention, RWKV-7.

Shapes: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, log-decays ``[B, T, HV, K]``, beta ``[B, T, HV]``, states
``[N, HV, K, V]``; one token has no T. Names, order and defaults are FLA's. ``chunk_*`` are for training and prompts,
``recurrent_*`` are the definitions, and ``*_step`` update the state in place and return o ``[B, HV, V]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.gates import RawGates
from mdn.ops.first_order.inputs import FirstOrderOutput, FirstOrderTensors
from mdn.ops.first_order.rule import HINTS, Rule, SharedArguments

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

GLA = Rule(
    "gla",
    {"q": "q", "k": "k", "v": "v", "log_alpha": "g"},
    vector=True,
    erases=False,
    fla_options=("state_v_first",),
)
KDA = Rule(
    "kda",
    {"q": "q", "k": "k", "v": "v", "log_alpha": "g", "beta": "beta"},
    vector=True,
    p_times_alpha=True,
    fla_options=("use_qk_l2norm_in_kernel", "state_v_first"),
    fla_shares_keys=True,
)
RWKV7 = Rule(
    "rwkv7",
    {"q": "r", "log_alpha": "w", "k": "k", "v": "v", "p": "a", "erase_key": "b"},
    vector=True,
    hints=(*HINTS, "lower_bound"),  # tells FLA's kernels that w lies above it
)


# ---------------------------------------------------------------------------------------------- gated linear attention


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """S_t = diag(exp g_t) S_{t-1} + k_t v_t^T."""
    shared = SharedArguments(
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        state_v_first=state_v_first,
        context_parallel=context_parallel,
        check_gates=check_gates,
    )
    return GLA.chunk(FirstOrderTensors(q, k, v, log_alpha=g), shared, chunk_size, backend, hints)


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
) -> FirstOrderOutput:
    """The definition of ``chunk_gla``, token by token."""
    shared = SharedArguments(scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return GLA.recurrent(FirstOrderTensors(q, k, v, log_alpha=g), shared)


def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    return GLA.step(FirstOrderTensors(q, k, v, log_alpha=g), state, scale, state_indices, backend, check_gates)


# ------------------------------------------------------------------------------------------------ Kimi delta attention


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """The gated delta rule with D_t = diag(exp g_t): S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T.

    With ``use_gate_in_kernel`` g is raw: the decay is -exp(A_log) softplus(g + dt_bias), or with ``lower_bound``
    lower_bound sigmoid(exp(A_log) (g + dt_bias)). With ``use_beta_sigmoid_in_kernel`` beta is raw and goes through a
    sigmoid, doubled by ``allow_neg_eigval``.
    """
    raw = RawGates(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound)
    tensors = KDA.with_gates(FirstOrderTensors(q, k, v, log_alpha=g, beta=beta), raw)
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
    return KDA.chunk(tensors, shared, chunk_size, backend, hints)


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
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> FirstOrderOutput:
    """The definition of ``chunk_kda``, token by token."""
    raw = RawGates(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound)
    tensors = KDA.with_gates(FirstOrderTensors(q, k, v, log_alpha=g, beta=beta), raw)
    shared = SharedArguments(
        scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first
    )
    return KDA.recurrent(tensors, shared)


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
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    tensors = FirstOrderTensors(q, k, v, log_alpha=g, beta=beta)
    return KDA.step(tensors, state, scale, state_indices, backend, check_gates, use_qk_l2norm_in_kernel)


# -------------------------------------------------------------------------------------------------------------- RWKV-7


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
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> FirstOrderOutput:
    """S_t = diag(exp w_t) S_{t-1} + k_t v_t^T + b_t (S_{t-1}^T a_t)^T, read by the receptance r_t.

    r, k ``[B, T, H, K]``; a, b and w ``[B, T, HV, K]``. The layer passes a = -kappa and b = kappa * (in-context
    learning rate) with a unit kappa.
    """
    shared = SharedArguments(
        scale, initial_state, output_final_state, cu_seqlens, context_parallel=context_parallel, check_gates=check_gates
    )
    return RWKV7.chunk(FirstOrderTensors(r, k, v, a, w, erase_key=b), shared, chunk_size, backend, hints)


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
) -> FirstOrderOutput:
    """The definition of ``chunk_rwkv7``, token by token."""
    shared = SharedArguments(scale, initial_state, output_final_state, cu_seqlens)
    return RWKV7.recurrent(FirstOrderTensors(r, k, v, a, w, erase_key=b), shared)


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
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token."""
    tensors = FirstOrderTensors(r, k, v, a, w, erase_key=b)
    return RWKV7.step(tensors, state, scale, state_indices, backend, check_gates)

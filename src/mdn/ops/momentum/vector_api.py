"""The momentum delta rule with a decay for every key dimension: one rule that contains the others.

    r_t = v_t - S_{t-1}^T p_t
    M_t = diag(mu_t) M_{t-1} - eta_t k_t r_t^T
    S_t = diag(alpha_t) S_{t-1} - beta_t M_t + direct_t k_t r_t^T
    o_t = scale * S_t^T q_t

| special case | how |
|---|---|
| the momentum delta rule | alpha_t the same number in every dimension |
| KDA | beta = 0 and direct its beta; or mu = 0 and eta = 1 |
| Gated DeltaNet, DeltaNet | KDA with one alpha_t for all dimensions, or with alpha_t = 1 |
| Nesterov's step | beta mu and direct = beta eta |

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V] (HV a multiple of H); log_alpha [B, T, HV, K]; log_mu [B, T, HV] or
[B, T, HV, K]; the other gates [B, T, HV]; states [2, N, HV, K, V], S then M. Arguments are those of the functions of
the scalar rule. The torch backend computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum import checks
from mdn.ops.momentum.api import ChunkCall, chunk_form, loop_form
from mdn.ops.momentum.interface import MomentumOutput
from mdn.ops.momentum.step import StepSettings, checked_step

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan


def chunk_vector_momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    p: Tensor | None = None,
    beta: Tensor | None = None,
    eta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    chunk_size: int = 64,
    *,
    direct: Tensor | None = None,
    lookahead: bool = False,
    backend: str = "auto",
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
) -> MomentumOutput:
    """Chunk by chunk, exact for every gate value; gradients of everything, for which only the inputs are kept.

    Arguments as in ``chunk_momentum_delta_rule``, but ``log_alpha`` is ``[B, T, HV, K]`` and ``log_mu`` ``[B, T, HV]``
    or ``[B, T, HV, K]``. The stability proof of docs/derivation.md covers one mu per head.
    """
    call = ChunkCall(
        scale,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_p_times_alpha,
        chunk_size,
        lookahead,
        backend,
        check_gates,
        context_parallel,
        vector=True,
    )
    return chunk_form(checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state), call)


def recurrent_vector_momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    p: Tensor | None = None,
    beta: Tensor | None = None,
    eta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    *,
    direct: Tensor | None = None,
    lookahead: bool = False,
) -> MomentumOutput:
    """The definition: a plain differentiable loop over tokens. Arguments as in ``chunk_vector_momentum_delta_rule``."""
    return loop_form(
        checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state),
        scale,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_p_times_alpha,
        lookahead,
        vector=True,
    )


def vector_momentum_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    p: Tensor | None = None,
    beta: Tensor | None = None,
    eta: Tensor | None = None,
    state: Tensor | tuple[Tensor, Tensor | None] | None = None,
    *,
    direct: Tensor | None = None,
    lookahead: bool = False,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token for every row, the state updated in place. Returns ``o [B, HV, V]``.

    Arguments as in ``momentum_delta_step``, but ``log_alpha`` is ``[B, HV, K]`` and ``log_mu`` ``[B, HV]`` or
    ``[B, HV, K]``.
    """
    tensors = checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct)
    settings = StepSettings(scale, use_qk_l2norm_in_kernel, use_p_times_alpha, lookahead, backend, vector=True)
    return checked_step(tensors, state, state_indices, settings, check_gates)

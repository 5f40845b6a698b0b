"""The public functions of the momentum delta rule: they check their arguments, a backend computes.

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V] (HV a multiple of H); gates [B, T, HV]; states [2, N, HV, K, V], S
then M, where N is B, or the number of sequences in ``cu_seqlens``.

The functions with ``vector`` in their names have a decay for every key dimension: log_alpha is [B, T, HV, K], and
log_mu [B, T, HV] or [B, T, HV, K]. That rule contains the others:

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mdn.ops import backends
from mdn.ops.boundaries import SequenceBoundaries, num_sequences
from mdn.ops.context_parallel import RangeOutput, TokenTensors, check_tokens, over_ranges, refuse_plan, requested_plan
from mdn.ops.momentum import checks, custom_op
from mdn.ops.momentum.interface import MomentumOutput, RuleOptions, RuleTensors, StepState, compute_dtype
from mdn.ops.momentum.reference import reference_form
from mdn.ops.momentum.step import StepSettings, features_of, step_function
from mdn.ops.shared_checks import check_initial_state, check_scale, without_autocast

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

# Below this many tokens a plain loop beats the chunk form's set-up.
LOOP_AT_MOST = 8


def chunk_momentum_delta_rule(
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
    """The stepwise momentum delta rule, computed chunk by chunk, exact for every gate value.

    Args:
        q, k: queries and keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; HV may be a multiple of H, value head j reads key head ``j // (HV // H)``.
        log_alpha, log_mu: logs of the decays of the fast weight and of the momentum, ``<= 0``; ``-inf`` is a hard zero.
        p: what the state is probed with before a write; None means k.
        beta, eta: step size and momentum input, ``>= 0``; None means ones. All gates are ``[B, T, HV]``.
        scale: factor on the output, ``K ** -0.5`` unless given.
        initial_state: ``[2, N, HV, K, V]`` (S, then M) or the pair (S, M), float32, or float64 for float64 inputs; None
            means zeros.
        output_final_state: also return the state after the last token of every sequence.
        cu_seqlens: cumulative lengths ``[N + 1]`` of sequences packed into one row (B == 1), or ``SequenceBoundaries``.
        use_qk_l2norm_in_kernel: L2-normalise q, k and p first.
        use_p_times_alpha: multiply p by alpha, so that the error is taken at the decayed state.
        chunk_size: largest chunk, 1 to 256 (a backend may use a smaller one). Changes speed; with repeated keys and
            weak damping also accuracy: chunk_size <= 16 is the accurate setting.
        direct: a write beside the momentum, ``S_t = alpha_t S_{t-1} - beta_t M_t + direct_t k_t r_t^T``, ``>= 0``; None
            means zeros. ``beta = 0`` is then Gated DeltaNet; ``beta mu`` with ``direct = beta eta`` is Nesterov's step.
        lookahead: take the error at ``alpha S - beta mu M``, where the step leads without a write (Nesterov's
            momentum as it was first written). It needs ``use_p_times_alpha``: that state has decayed already.
        backend: ``auto``, ``torch``, ``cpu`` or ``triton``; an explicitly requested backend never falls back.
        check_gates: raise for gates out of range (CPU tensors only: it reads values).
        context_parallel: the tokens are this rank's of a row that several processes share; states are those of all
            documents of the plan, the same on every rank.

    Returns:
        ``o [B, T, HV, V]`` and the final state, or None.
    """
    tensors = checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    call = RuleCall(
        scale=scale,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
        p_times_alpha=use_p_times_alpha,
        lookahead=lookahead,
    )
    return chunk_form(tensors, call, chunk_size, backend, check_gates, context_parallel)


def recurrent_momentum_delta_rule(
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
    """The definition: a plain differentiable loop over tokens. Arguments as in ``chunk_momentum_delta_rule``."""
    call = RuleCall(
        scale=scale,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
        p_times_alpha=use_p_times_alpha,
        lookahead=lookahead,
    )
    return loop_form(checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state), call)


def blockwise_momentum_delta_rule(
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
    block_size: int = 64,
    *,
    direct: Tensor | None = None,
    backend: str = "auto",
) -> MomentumOutput:
    """What the paper argues against: every error in a block is taken at the state that began the block.

    ``block_size=1`` is the stepwise rule. Training with larger blocks and decoding token by token is the mismatch that
    the paper names; this op exists to measure it. Blocks are counted from the start of each sequence. It is computed in
    torch only: another backend is refused.
    """
    requested, request = backends.requested_backend(backend)
    if requested not in ("auto", "torch"):
        raise ValueError(f"{request} cannot be used here: blockwise momentum is computed by the torch backend only")
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    tensors = checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    call = RuleCall(
        scale=scale,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
        p_times_alpha=use_p_times_alpha,
    )
    return loop_form(tensors, call, block_size)


def fused_recurrent_momentum_delta_rule(
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
    backend: str = "auto",
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
) -> MomentumOutput:
    """For short inputs: token by token in place when no gradient is needed, else the chunk form.

    Arguments as in ``chunk_momentum_delta_rule``.
    """
    tensors = checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    checks.check_tensors(tensors, rank=4)
    plan = requested_plan(context_parallel, cu_seqlens)
    short = plan is None and cu_seqlens is None and 0 < q.shape[1] <= LOOP_AT_MOST
    if not short or custom_op.wants_gradients(tensors) or custom_op.needs_dispatch(tensors):
        call = RuleCall(
            scale=scale,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            l2norm=use_qk_l2norm_in_kernel,
            p_times_alpha=use_p_times_alpha,
            lookahead=lookahead,
        )
        return chunk_form(tensors, call, backend=backend, check_gates=check_gates, context_parallel=plan)
    _check_state(tensors, q.shape[0])
    if check_gates:
        checks.check_gate_values(tensors)
    state = tensors.state_to_update(boundaries=None)
    slots, outputs = StepState(state[0], state[1]), []
    settings = StepSettings(scale, use_qk_l2norm_in_kernel, use_p_times_alpha, lookahead, backend)
    for t in range(q.shape[1]):
        token = RuleTensors(*(None if x is None else x[:, t] for x in tensors.of_tokens))  # type: ignore[arg-type]
        run = step_function(token, slots, settings)
        outputs.append(run(token, slots))
    return MomentumOutput(torch.stack(outputs, dim=1), state if output_final_state else None)


# -------------------------------------------------------------------------------------- a decay for every key dimension


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
    tensors = checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    call = RuleCall(
        scale=scale,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
        p_times_alpha=use_p_times_alpha,
        lookahead=lookahead,
        vector=True,
    )
    return chunk_form(tensors, call, chunk_size, backend, check_gates, context_parallel)


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
    call = RuleCall(
        scale=scale,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
        p_times_alpha=use_p_times_alpha,
        lookahead=lookahead,
        vector=True,
    )
    return loop_form(checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state), call)


# ------------------------------------------------------------------------------------------------------------ shared


class RuleCall(NamedTuple):
    """The arguments that all forms share and that are not tensors, as they were given."""

    scale: float | None
    output_final_state: bool
    cu_seqlens: Tensor | SequenceBoundaries | None
    l2norm: bool
    p_times_alpha: bool
    lookahead: bool = False
    vector: bool = False
    """whether log_alpha has a number for every key dimension"""
    outputs: bool = True
    """False: only the final state is needed"""


def chunk_form(
    tensors: RuleTensors,
    call: RuleCall,
    chunk_size: int = 64,
    backend: str = "auto",
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
) -> MomentumOutput:
    """Chunk by chunk: scalar or vector decays, this rank's tokens of a plan or all of them."""
    checks.check_chunk_size(chunk_size)
    plan = requested_plan(context_parallel, call.cu_seqlens)
    if plan is not None:

        def rule(
            part: TokenTensors, state: Tensor | None, boundaries: SequenceBoundaries, outputs: bool
        ) -> MomentumOutput:
            given = RuleTensors(**part, initial_state=state)  # type: ignore[arg-type]
            alone = call._replace(output_final_state=True, cu_seqlens=boundaries, outputs=outputs)
            return chunk_form(given, alone, chunk_size, backend, check_gates)

        return _over_ranges(rule, tensors, plan, call)
    boundaries = _check(tensors, call.cu_seqlens, call.vector)
    features = features_of(tensors, call.lookahead)
    chosen = backends.resolve(backend, tensors.q, tensors.family, tensors.v, features=features)
    p_times_alpha = checks.check_probe(call.p_times_alpha, call.lookahead)
    scale, chunk_size = check_scale(call.scale, tensors.q), backends.chunk_size_for(chosen, chunk_size)
    options = RuleOptions(scale, chunk_size, call.l2norm, p_times_alpha, call.lookahead, call.outputs)
    result = custom_op.forward(tensors, boundaries, options, check_gates, chosen)
    return MomentumOutput(result.o, result.final_state if call.output_final_state else None)


def _check(
    tensors: RuleTensors, cu_seqlens: Tensor | SequenceBoundaries | None, vector: bool = False
) -> SequenceBoundaries | Tensor | None:
    """Everything but values; returns the boundaries."""
    checks.check_tensors(tensors, rank=4, vector=vector)
    boundaries = checks.check_boundaries(cu_seqlens, tensors.q)
    _check_state(tensors, tensors.q.shape[0] if boundaries is None else num_sequences(boundaries))
    return boundaries


def _check_state(tensors: RuleTensors, sequences: int) -> None:
    q, v, state = tensors.q, tensors.v, tensors.initial_state
    if state is not None:
        expected = (2, sequences, v.shape[2], q.shape[3], v.shape[3])
        check_initial_state(state, "2, N, HV, K, V", expected, q)


def _over_ranges(
    rule: Callable[[TokenTensors, Tensor | None, SequenceBoundaries, bool], MomentumOutput],
    tensors: RuleTensors,
    plan: ContextParallelPlan,
    call: RuleCall,
) -> MomentumOutput:
    """For this rank's tokens of a plan; S above M is one state of 2K rows."""
    checks.check_tensors(tensors, rank=4, vector=call.vector)
    check_tokens("q", tensors.q, plan)
    _check_state(tensors, plan.documents.num_sequences)

    def on_rows(part: TokenTensors, X: Tensor | None, boundaries: SequenceBoundaries, outputs: bool) -> RangeOutput:
        state = None if X is None else X.unflatten(2, (2, -1)).movedim(2, 0)
        o, final = rule(part, state, boundaries, outputs)
        assert final is not None
        return RangeOutput(o, _rows(final))

    given = tensors._asdict()
    state = given.pop("initial_state")
    initial = None if state is None else _rows(state.to(compute_dtype(tensors.q)))
    o, X = over_ranges(on_rows, given, 2 * tensors.q.shape[3], plan, initial, call.output_final_state)
    return MomentumOutput(o, None if X is None else X.unflatten(2, (2, -1)).movedim(2, 0))


def _rows(state: Tensor) -> Tensor:
    """[2, N, HV, K, V] to [N, HV, 2K, V]."""
    return state.movedim(0, 2).flatten(2, 3)


def loop_form(tensors: RuleTensors, call: RuleCall, block_size: int = 1) -> MomentumOutput:
    """Token by token, or block by block, differentiable."""
    refuse_plan("a loop over tokens", "use chunk_momentum_delta_rule")
    boundaries = _check(tensors, call.cu_seqlens, call.vector)
    if isinstance(boundaries, Tensor):
        boundaries = SequenceBoundaries.from_cu_seqlens(boundaries, tensors.q.shape[1])
    checks.check_gate_values(tensors)
    p_times_alpha = checks.check_probe(call.p_times_alpha, call.lookahead)
    scale = check_scale(call.scale, tensors.q)
    options = RuleOptions(scale, l2norm=call.l2norm, p_times_alpha=p_times_alpha, lookahead=call.lookahead)
    with without_autocast(tensors.q):
        o, state = reference_form(tensors, boundaries, options, block_size)
    return MomentumOutput(o, state if call.output_final_state else None)

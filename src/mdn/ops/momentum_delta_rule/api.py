"""The public functions of the momentum delta rule: arguments checked here, work done by a backend.

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V] (HV a multiple of H); gates [B, T, HV]; states [2, N, HV, K, V], S
then M, where N is B, or the number of sequences in ``cu_seqlens``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mdn.ops import backends
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum_delta_rule import dispatch, validation
from mdn.ops.momentum_delta_rule.options import RuleOptions, compute_dtype
from mdn.ops.momentum_delta_rule.recurrent import recurrent_form

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
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    chunk_size: int = 64,
    *,
    backend: str = "auto",
    check_gates: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The stepwise momentum delta rule, computed chunk by chunk, exact for every gate value.

    Args:
        q, k: queries and keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; HV may be a multiple of H, value head j reads key head ``j // (HV // H)``.
        log_alpha, log_mu: logs of the decays of the fast weight and of the momentum, ``<= 0``; ``-inf`` is a hard zero.
        p: what the state is probed with before a write; None means k.
        beta, eta: step size and momentum input, ``>= 0``; None means ones. All gates are ``[B, T, HV]``.
        scale: factor on the output, ``K ** -0.5`` unless given.
        initial_state: ``[2, N, HV, K, V]`` (S, then M), float32, or float64 for float64 inputs; None means zeros.
        output_final_state: also return the state after the last token of every sequence.
        cu_seqlens: cumulative lengths ``[N + 1]`` of sequences packed into one row (B == 1), or ``SequenceBoundaries``.
        use_qk_l2norm_in_kernel: L2-normalise q, k and p first.
        use_p_times_alpha: multiply p by alpha, so that the error is taken at the decayed state.
        chunk_size: largest chunk, 1 to 256; affects speed only (a backend may use a smaller one).
        backend: ``auto``, ``torch``, ``cpu`` or ``triton``; a backend asked for by name never falls back.
        check_gates: raise for gates out of range (CPU tensors only: it reads values).

    Returns:
        ``o [B, T, HV, V]`` and the final state, or None.
    """
    validation.check_chunk_size(chunk_size)
    beta, eta = _fill(beta, v), _fill(eta, v)
    cu_seqlens, scale = _check(q, k, v, p, log_alpha, log_mu, beta, eta, scale, initial_state, cu_seqlens)
    inputs = (q, k, v, p, log_alpha, log_mu, beta, eta, initial_state)
    save_residual = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    chosen = backends.resolve(backend, q, v)
    o, final_state, _ = dispatch.momentum_delta_rule(
        *inputs,
        cu_seqlens,
        scale,
        backends.chunk_size_for(chosen, chunk_size),
        use_qk_l2norm_in_kernel,
        use_p_times_alpha,
        save_residual,
        check_gates,
        chosen,
    )
    return o, final_state if output_final_state else None


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
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The definition: a plain differentiable loop over tokens. Arguments as in ``chunk_momentum_delta_rule``."""
    return _loop(
        (q, k, v, p, log_alpha, log_mu, beta, eta),
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_p_times_alpha,
        block_size=1,
    )


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
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    block_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """What the paper argues against: every error in a block is taken at the state that began the block.

    ``block_size=1`` is the stepwise rule. Training with larger blocks and decoding token by token is the mismatch that
    the paper names; this op exists to measure it. Blocks are counted from the start of each sequence.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    return _loop(
        (q, k, v, p, log_alpha, log_mu, beta, eta),
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_p_times_alpha,
        block_size,
    )


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
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    *,
    backend: str = "auto",
    check_gates: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """For short inputs: token by token in place when no gradient is asked for, else the chunk form.

    Arguments as in ``chunk_momentum_delta_rule``.
    """
    tensors = (q, k, v, p, log_alpha, log_mu, beta, eta, initial_state)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    short = cu_seqlens is None and q.dim() == 4 and 0 < q.shape[1] <= LOOP_AT_MOST
    if wants_grad or not short or torch.compiler.is_compiling() or q.device.type == "meta":
        return chunk_momentum_delta_rule(
            *(q, k, v, log_alpha, log_mu, p, beta, eta, scale, initial_state, output_final_state, cu_seqlens),
            *(use_qk_l2norm_in_kernel, use_p_times_alpha),
            backend=backend,
            check_gates=check_gates,
        )
    beta, eta = _fill(beta, v), _fill(eta, v)
    _, scale = _check(q, k, v, p, log_alpha, log_mu, beta, eta, scale, initial_state, None)
    if check_gates:
        validation.check_gate_values(log_alpha, log_mu, beta, eta)
    chosen = backends.resolve(backend, q, v)
    state = _own_state(initial_state, q, v)
    outputs = []
    settings: tuple[Any, ...] = (None, scale, use_qk_l2norm_in_kernel, use_p_times_alpha, chosen)
    for t in range(q.shape[1]):
        now = [None if x is None else x[:, t] for x in (q, k, v, p, log_alpha, log_mu, beta, eta)]
        arguments: list[Any] = [*now, state[0], state[1], *settings]
        outputs.append(dispatch.step_now(*arguments))
    return torch.stack(outputs, dim=1), state if output_final_state else None


def momentum_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    p: Tensor | None,
    beta: Tensor | None,
    eta: Tensor | None,
    state: Tensor | tuple[Tensor, Tensor],
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_p_times_alpha: bool = True,
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token for every row, the state updated in place.

    Args:
        q, k, p: ``[B, H, K]``; v: ``[B, HV, V]``; gates: ``[B, HV]``.
        state: ``[2, slots, HV, K, V]`` (S, then M), or the pair (S, M); float32, or float64 for float64 inputs.
        state_indices: int64 or int32 ``[B]``, the slot of each row; None means row b uses slot b. Slots must be
            distinct and exist: checked for CPU tensors; on a GPU, where reading them would stop the stream, Triton
            skips a row whose slot does not exist (its o is zero).
        check_gates: raise for gates out of range and for bad slots (CPU tensors only: it reads values).

    Returns:
        ``o [B, HV, V]``.
    """
    beta, eta = _fill(beta, v), _fill(eta, v)
    inputs = (q, k, v, p, log_alpha, log_mu, beta, eta)
    fast_weight, momentum = validation.check_step_pair(state)
    settings = (scale, use_qk_l2norm_in_kernel, use_p_times_alpha, backend)
    signature = None
    if not torch.compiler.is_compiling():
        # Decoding repeats the same shapes; looking them up takes a fraction of the time of checking them.
        signature = (settings, *map(_signature, (*inputs, fast_weight, momentum, state_indices)))
    known = _KNOWN_STEPS.get(signature)
    options, chosen = known[:2] if known else _check_step(inputs, fast_weight, momentum, state_indices, *settings)
    if state_indices is not None:
        state_indices = validation.check_state_indices(state_indices, fast_weight, v.shape[0], read=check_gates)
    if check_gates:
        validation.check_gate_values(log_alpha, log_mu, beta, eta)
    tensors = (*inputs, fast_weight, momentum, state_indices)
    if signature is None:
        flags = (options.scale, use_qk_l2norm_in_kernel, use_p_times_alpha, chosen)
        return dispatch.momentum_delta_step(*tensors, *flags)
    if known is None:
        known = _KNOWN_STEPS[signature] = (options, chosen, dispatch.eager_step(tensors, options, chosen))
        if len(_KNOWN_STEPS) > 256:
            _KNOWN_STEPS.clear()
    return known[2](tensors)  # not the custom op: its dispatch would cost more than a small step


_KNOWN_STEPS: dict[Any, tuple[RuleOptions, str, Callable[[Any], Tensor]]] = {}


def _signature(x: Tensor | None) -> tuple[Any, ...] | None:
    """All of a tensor that the checks look at; of anything else its type."""
    if x is None:
        return None
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x),)


def _check_step(
    inputs, fast_weight, momentum, state_indices, scale, l2norm, p_times_alpha, backend
) -> tuple[RuleOptions, str]:
    """Everything but values; returns the options and the backend that will run."""
    q, v = inputs[0], inputs[2]
    validation.check_tensors(_named(*inputs), rank=3)
    validation.check_step_state(fast_weight, momentum, state_indices, q, v)
    options = RuleOptions(validation.check_scale(scale, q), 1, l2norm, p_times_alpha)
    return options, backends.resolve(backend, q, v)


# ------------------------------------------------------------------------------------------------------------ shared


def _loop(
    tensors, scale, initial_state, output_final_state, cu_seqlens, l2norm, p_times_alpha, block_size
) -> tuple[Tensor, Tensor | None]:
    q, k, v, p, log_alpha, log_mu, beta, eta = tensors
    beta, eta = _fill(beta, v), _fill(eta, v)
    cu_seqlens, scale = _check(q, k, v, p, log_alpha, log_mu, beta, eta, scale, initial_state, cu_seqlens)
    validation.check_gate_values(log_alpha, log_mu, beta, eta)
    boundaries = None if cu_seqlens is None else SequenceBoundaries.from_cu_seqlens(cu_seqlens, q.shape[1])
    options = RuleOptions(scale, 1, l2norm, p_times_alpha)
    inputs = (q, k, v, p, log_alpha, log_mu, beta, eta)
    with torch.autocast(q.device.type, enabled=False):
        o, state = recurrent_form(*inputs, initial_state, boundaries, options, block_size)
    return o, state if output_final_state else None


def _named(q, k, v, p, log_alpha, log_mu, beta, eta) -> dict[str, Tensor | None]:
    return {"q": q, "k": k, "v": v, "p": p, "log_alpha": log_alpha, "log_mu": log_mu, "beta": beta, "eta": eta}


def _check(q, k, v, p, log_alpha, log_mu, beta, eta, scale, initial_state, cu_seqlens) -> tuple[Tensor | None, float]:
    """Everything but values; returns the cu_seqlens tensor and the scale as a number."""
    validation.check_tensors(_named(q, k, v, p, log_alpha, log_mu, beta, eta), rank=4)
    cu_seqlens = validation.check_boundaries(cu_seqlens, q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = (2, sequences, v.shape[2], q.shape[3], v.shape[3])
    validation.check_state("initial_state", initial_state, expected, q)
    return cu_seqlens, validation.check_scale(scale, q)


def _fill(gate: Tensor | None, v: Tensor) -> Tensor:
    if gate is not None or not isinstance(v, Tensor):
        return gate
    return torch.ones(v.shape[:-1], dtype=torch.float64 if v.dtype == torch.float64 else torch.float32, device=v.device)


def _own_state(initial_state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    dtype = compute_dtype(q)
    if initial_state is not None:
        return initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return q.new_zeros(2, v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)

"""The momentum delta rule as torch custom ops, so that compile, autocast, meta tensors and autograd see one opaque
call.

``mdn::momentum_delta_rule`` computes (o, final_state, residual); its autograd formula calls
``mdn::momentum_delta_rule_backward``; ``mdn::momentum_delta_step`` is the in-place decode step. The ``backend``
argument is already resolved to a name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from mdn.ops.backends import backend_module
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum_delta_rule.options import RuleOptions, compute_dtype
from mdn.ops.momentum_delta_rule.validation import check_gate_values


def _boundaries(cu_seqlens: Tensor | None, total: int) -> SequenceBoundaries | None:
    return None if cu_seqlens is None else SequenceBoundaries.from_cu_seqlens(cu_seqlens, total)


def _own_precision(x: Tensor) -> AbstractContextManager:
    """Products inside choose their own precision, whatever autocast says. (Entering autocast takes as long as a small
    decode step, so it is entered only when there is one to leave.)"""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@torch.library.custom_op("mdn::momentum_delta_rule", mutates_args=())
def momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    l2norm: bool,
    p_times_alpha: bool,
    save_residual: bool,
    check_gates: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if check_gates:
        check_gate_values(log_alpha, log_mu, beta, eta)
    options = RuleOptions(scale, chunk_size, l2norm, p_times_alpha)
    boundaries = _boundaries(cu_seqlens, q.shape[1])
    inputs = (q, k, v, p, log_alpha, log_mu, beta, eta, initial_state)
    with _own_precision(q):
        return backend_module(backend).forward(*inputs, boundaries, options, save_residual)


@momentum_delta_rule.register_fake
def _(q, k, v, p, log_alpha, log_mu, beta, eta, initial_state, cu_seqlens, scale, chunk_size, *flags):
    save_residual, backend = flags[2], flags[4]
    dtype = compute_dtype(q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    final_state = v.new_empty(2, sequences, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    residual = v.new_empty(v.shape if save_residual else (0,), dtype=v.dtype if backend == "triton" else dtype)
    return o, final_state, residual


@torch.library.custom_op("mdn::momentum_delta_rule_backward", mutates_args=())
def momentum_delta_rule_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    initial_state: Tensor | None,
    residual: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    l2norm: bool,
    p_times_alpha: bool,
    backend: str,
) -> list[Tensor]:
    options = RuleOptions(scale, chunk_size, l2norm, p_times_alpha)
    boundaries = _boundaries(cu_seqlens, q.shape[1])
    inputs = (q, k, v, p, log_alpha, log_mu, beta, eta, initial_state)
    with _own_precision(q):
        grads = backend_module(backend).backward(grad_o, grad_final_state, *inputs, residual, boundaries, options)
    return [q.new_empty(0) if grad is None else grad for grad in grads]


@momentum_delta_rule_backward.register_fake
def _(grad_o, grad_final_state, q, k, v, p, log_alpha, log_mu, beta, eta, initial_state, residual, *settings):
    inputs = (q, k, v, p, log_alpha, log_mu, beta, eta, initial_state)
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in inputs]


def _remember(ctx, inputs, output) -> None:
    *tensors, scale, chunk_size, l2norm, p_times_alpha, _save, _check, backend = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.settings = (scale, chunk_size, l2norm, p_times_alpha, backend)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_o, grad_final_state, _grad_residual):
    *inputs, cu_seqlens, residual = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(inputs[2])
    grads = momentum_delta_rule_backward(grad_o, grad_final_state, *inputs, residual, cu_seqlens, *ctx.settings)
    grads = [None if x is None else grad for x, grad in zip(inputs, grads)]
    return (*grads, None, *(None for _ in range(7)))


def _no_second_backward(ctx, *grads):
    raise NotImplementedError(
        "the chunkwise momentum delta rule has no second derivative; "
        "use recurrent_momentum_delta_rule, which is plain torch"
    )


torch.library.register_autograd("mdn::momentum_delta_rule", _backward, setup_context=_remember)
torch.library.register_autograd(
    "mdn::momentum_delta_rule_backward", _no_second_backward, setup_context=lambda *a, **k: None
)


def step_now(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    fast_weight: Tensor,
    momentum: Tensor,
    state_indices: Tensor | None,
    scale: float,
    l2norm: bool,
    p_times_alpha: bool,
    backend: str,
) -> Tensor:
    """One token, both states updated in place."""
    tensors = (q, k, v, p, log_alpha, log_mu, beta, eta, fast_weight, momentum, state_indices)
    return _step(tensors, RuleOptions(scale, 1, l2norm, p_times_alpha), backend)


def _step(tensors: tuple[Tensor | None, ...], options: RuleOptions, backend: str) -> Tensor:
    assert tensors[0] is not None
    with torch.no_grad(), _own_precision(tensors[0]):
        return backend_module(backend).step_(*tensors, options)


def eager_step(
    tensors: tuple[Tensor | None, ...], options: RuleOptions, backend: str
) -> Callable[[tuple[Tensor | None, ...]], Tensor]:
    """The step for tensors like these without the custom op, prepared once if the backend can."""
    prepare = getattr(backend_module(backend), "prepared_step", None)
    prepared = None if prepare is None else prepare(tensors, options)
    return prepared or partial(_step, options=options, backend=backend)


momentum_delta_step = torch.library.custom_op(
    "mdn::momentum_delta_step", step_now, mutates_args=("fast_weight", "momentum")
)


@momentum_delta_step.register_fake
def _(q, k, v, *rest):
    return v.new_empty(v.shape)

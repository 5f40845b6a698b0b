"""The rule as custom ops of torch, so that compilers, autograd, autocast and meta tensors see one call.

``mdn::momentum_delta_rule`` computes (o, final_state, residual); its autograd formula calls
``mdn::momentum_delta_rule_backward``; ``mdn::momentum_delta_step`` is the in-place decode step. The ``backend``
argument is already resolved to a name. Flat argument lists exist only in this file, because the schema of an op has
no other kind. An eager call without gradients needs none of this: it goes to the backend directly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdn.ops.backends import backend_module
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.checks import check_gate_values
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors, StepState, compute_dtype
from mdn.ops.shared_checks import has_tangents, in_plain_memory, refuse_transforms, without_autocast


def forward(
    tensors: RuleTensors,
    boundaries: SequenceBoundaries | Tensor | None,
    options: RuleOptions,
    check_gates: bool,
    backend: str,
) -> ForwardResult:
    """The chunk form on a resolved backend, as a custom op where compilers, autograd or transforms must see it."""
    save_residual = wants_gradients(tensors)
    if not save_residual and not needs_dispatch(tensors) and not isinstance(boundaries, Tensor):
        if check_gates:
            check_gate_values(tensors)
        with without_autocast(tensors.q):
            result: ForwardResult = backend_module(backend, tensors.family).forward(
                tensors, boundaries, options, save_residual
            )
            return result
    # options.outputs is not passed on: the op has one schema and always computes o.
    name = "momentum_delta_rule" if tensors.family == "momentum" else "vector_momentum_delta_rule"
    refuse_transforms(f"chunk_{name}", f"recurrent_{name}", tensors, derivatives_only=True)
    outputs = momentum_delta_rule(
        *tensors,
        boundaries.cu_seqlens if isinstance(boundaries, SequenceBoundaries) else boundaries,
        options.scale,
        options.chunk_size,
        options.l2norm,
        options.p_times_alpha,
        options.lookahead,
        save_residual,
        check_gates,
        backend,
    )
    return ForwardResult(*outputs)


def wants_gradients(tensors: RuleTensors) -> bool:
    """Whether there may be a backward pass. Under vmap a tensor does not show that it requires a gradient."""
    mapped = not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None
    return torch.is_grad_enabled() and (mapped or any(x is not None and x.requires_grad for x in tensors))


def needs_dispatch(tensors: RuleTensors) -> bool:
    """Whether the call must go through torch's dispatcher, because something that cannot see into a backend is at work:
    a compiler, a tracer, a dispatch mode, a function transform, forward-mode derivatives, a tensor subclass, meta
    tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or tensors.q.device.type == "meta"
        or not in_plain_memory(tensors)
        or has_tangents(tensors)
    )


def _boundaries(cu_seqlens: Tensor | None, q: Tensor) -> SequenceBoundaries | None:
    return None if cu_seqlens is None else SequenceBoundaries.from_cu_seqlens(cu_seqlens, q.shape[1]).to(q.device)


# ------------------------------------------------------------------------------------------------------------- forward


class _Arguments(NamedTuple):
    """The arguments of ``mdn::momentum_delta_rule``, or their gradients, by name."""

    q: Any
    k: Any
    v: Any
    p: Any
    log_alpha: Any
    log_mu: Any
    beta: Any
    eta: Any
    direct: Any
    initial_state: Any
    cu_seqlens: Any = None
    scale: Any = None
    chunk_size: Any = None
    l2norm: Any = None
    p_times_alpha: Any = None
    lookahead: Any = None
    save_residual: Any = None
    check_gates: Any = None
    backend: Any = None

    @property
    def tensors(self) -> RuleTensors:
        return RuleTensors(**{name: getattr(self, name) for name in RuleTensors._fields})


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
    direct: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    l2norm: bool,
    p_times_alpha: bool,
    lookahead: bool,
    save_residual: bool,
    check_gates: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = RuleTensors(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    if check_gates:
        check_gate_values(tensors)
    options = RuleOptions(scale, chunk_size, l2norm, p_times_alpha, lookahead)
    with without_autocast(q):
        module, boundaries = backend_module(backend, tensors.family), _boundaries(cu_seqlens, q)
        result = module.forward(tensors, boundaries, options, save_residual)
    return tuple(result)


@momentum_delta_rule.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _Arguments(*arguments)
    q, v = call.q, call.v
    dtype = compute_dtype(q)
    sequences = q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    final_state = v.new_empty(2, sequences, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    residual_dtype = v.dtype if call.backend == "triton" else dtype
    saved = call.save_residual and call.tensors.family == "momentum"  # vector decays need the inputs only
    residual = v.new_empty(v.shape if saved else (0,), dtype=residual_dtype)
    return o, final_state, residual


# ------------------------------------------------------------------------------------------------------------ backward


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
    direct: Tensor | None,
    initial_state: Tensor | None,
    residual: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    l2norm: bool,
    p_times_alpha: bool,
    lookahead: bool,
    backend: str,
) -> list[Tensor]:
    """Gradients in the order of ``RuleTensors``; an op cannot return None in a list, so it is an empty tensor."""
    tensors = RuleTensors(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    options = RuleOptions(scale, chunk_size, l2norm, p_times_alpha, lookahead)
    boundaries = _boundaries(cu_seqlens, q)
    with without_autocast(q):
        module = backend_module(backend, tensors.family)
        grads = module.backward(grad_o, grad_final_state, tensors, residual, boundaries, options)
    return [q.new_empty(0) if grad is None else grad for grad in grads]


@momentum_delta_rule_backward.register_fake
def _(
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
    direct: Tensor | None,
    initial_state: Tensor | None,
    *settings: Any,
) -> list[Tensor]:
    inputs = RuleTensors(q, k, v, p, log_alpha, log_mu, beta, eta, direct, initial_state)
    # Contiguous, as backends return them; empty_like would keep the strides of a transposed input.
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = _Arguments(*inputs)
    ctx.save_for_backward(*call.tensors, call.cu_seqlens, ForwardResult(*output).residual)
    ctx.settings = (call.scale, call.chunk_size, call.l2norm, call.p_times_alpha, call.lookahead, call.backend)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, _grad_residual: None) -> _Arguments:
    *saved, cu_seqlens, residual = ctx.saved_tensors
    tensors = RuleTensors(*saved)
    if grad_o is None:
        grad_o = torch.zeros_like(tensors.v)
    grads = momentum_delta_rule_backward(grad_o, grad_final_state, *tensors, residual, cu_seqlens, *ctx.settings)
    return _Arguments(*(None if x is None else grad for x, grad in zip(tensors, grads)))


def _no_second_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "the chunkwise momentum delta rule has no second derivative; "
        "use recurrent_momentum_delta_rule, which is plain torch"
    )


torch.library.register_autograd("mdn::momentum_delta_rule", _backward, setup_context=_setup_context)
torch.library.register_autograd(
    "mdn::momentum_delta_rule_backward", _no_second_backward, setup_context=lambda *a, **k: None
)


# ---------------------------------------------------------------------------------------------------------------- step


@torch.library.custom_op("mdn::momentum_delta_step", mutates_args=("S", "M"))
def momentum_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    direct: Tensor | None,
    S: Tensor,
    M: Tensor | None,
    state_indices: Tensor | None,
    scale: float,
    l2norm: bool,
    p_times_alpha: bool,
    lookahead: bool,
    backend: str,
) -> Tensor:
    """One token, both states updated in place."""
    tensors = RuleTensors(q, k, v, p, log_alpha, log_mu, beta, eta, direct)
    options = RuleOptions(scale, l2norm=l2norm, p_times_alpha=p_times_alpha, lookahead=lookahead)
    with torch.no_grad(), without_autocast(q):
        module = backend_module(backend, tensors.family)
        o: Tensor = module.step_(tensors, StepState(S, M, state_indices), options)
    return o


@momentum_delta_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape)

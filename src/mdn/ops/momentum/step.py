"""The decode step: one token for every row, the states updated in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from mdn.ops import backends
from mdn.ops.momentum import checks, custom_op
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState
from mdn.ops.shared_checks import (
    check_apart,
    check_scale,
    check_state_indices,
    in_plain_memory,
    refuse_gradients,
    refuse_transforms,
    without_autocast,
)
from mdn.ops.tracing import is_traced

StepFunction = Callable[[RuleTensors, StepState], Tensor]
Step = TypeVar("Step")
STEP_FIELDS = (*RuleTensors._fields, *StepState._fields)
NAMES = ("momentum_delta_step", "momentum_delta_rule")
VECTOR_NAMES = ("vector_momentum_delta_step", "vector_momentum_delta_rule")


class StepSettings(NamedTuple):
    """The arguments of a step that are not tensors, as they were given."""

    scale: float | None
    l2norm: bool
    p_times_alpha: bool
    lookahead: bool
    backend: str
    vector: bool = False
    """whether log_alpha has a number for every key dimension"""


def momentum_delta_step(
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
    """One token for every row, the state updated in place.

    Args:
        q, k, p: ``[B, H, K]``; v: ``[B, HV, V]``; gates: ``[B, HV]``. p None means k, beta and eta None mean ones,
            direct None means zeros.
        state: required; ``[2, slots, HV, K, V]`` (S, then M), or the pair (S, M); float32, or float64 for float64
            inputs. (S, None) is the rule with mu = 0, which forgets M at every token: log_mu is not read.
        state_indices: int64 or int32 ``[B]``, the slot of each row; None means row b uses slot b. Slots must be
            distinct and exist: checked for CPU tensors; on a GPU, where reading them would stop the stream, Triton
            skips a row whose slot does not exist (its o is zero).
        check_gates: raise for gates out of range and for bad slots (CPU tensors only: it reads values).

    Returns:
        ``o [B, HV, V]``.
    """
    tensors = checks.bundle(q, k, v, p, log_alpha, log_mu, beta, eta, direct)
    settings = StepSettings(scale, use_qk_l2norm_in_kernel, use_p_times_alpha, lookahead, backend)
    return run_step(tensors, state, state_indices, settings, check_gates)


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
    return run_step(tensors, state, state_indices, settings, check_gates)


def run_step(
    tensors: RuleTensors,
    state: Tensor | tuple[Tensor, Tensor | None] | None,
    state_indices: Tensor | None,
    settings: StepSettings,
    check_gates: bool,
) -> Tensor:
    """Check the values, find the step for tensors like these, and run it: scalar or vector decays."""
    S, M = checks.state_pair("state", state)
    if M is None:  # log_mu is not read: whatever was given, something that passes the checks takes its place
        tensors = tensors._replace(log_mu=tensors.log_alpha)
    slots = StepState(S, M, state_indices)
    step, rule = VECTOR_NAMES if settings.vector else NAMES
    if not torch.compiler.is_compiling() and maybe_current_level() is not None:
        refuse_transforms(step, f"recurrent_{rule}", tensors + slots)
    run = step_function(tensors, slots, settings)
    if state_indices is not None:
        slots = slots._replace(state_indices=check_state_indices(state_indices, S, len(tensors.v), read=check_gates))
    if forward_ad._current_level >= 0:  # looking at the level first is cheaper
        refuse_transforms(step, f"recurrent_{rule}", tensors + slots)
    refuse_gradients(step, rule, tensors + slots, STEP_FIELDS)
    if check_gates:
        checks.check_gate_values(tensors)
    return run(tensors, slots)


def features_of(tensors: RuleTensors, lookahead: bool) -> tuple[str, ...]:
    """The parts of the general rule that are in use beyond the paper's; a backend may lack them."""
    direct = () if tensors.direct is None else ("direct",)
    return (*direct, "lookahead") if lookahead else direct


def prepared_once(
    settings: Hashable,
    tokens: Iterable[Tensor | None],
    states: Iterable[Tensor | None],
    prepare: Callable[..., Step],
    *arguments: Any,
) -> Step:
    """``prepare(*arguments)``: the step for tensors like these. Decoding repeats the same shapes; looking them up takes
    a fraction of the time of checking them. The table is emptied when it grows too long."""
    try:  # everything about a tensor that the checks and the preparation look at; is_cpu is faster than device
        signature = (
            settings,
            *[x if x is None else (type(x), x.shape, x.is_contiguous(), x.dtype, x.is_cpu or x.device) for x in tokens],
            *[x if x is None else (type(x), x.shape, x.stride(), x.dtype, x.is_cpu or x.device) for x in states],
        )
        run: Step | None = backends.prepared_steps.get(signature)
    except (AttributeError, TypeError):  # not a tensor, or a list as scale: the checks name the argument
        return prepare(*arguments)
    if run is not None and not is_traced():
        return run
    run = prepare(*arguments)
    if in_plain_memory((*tokens, *states)):
        if len(backends.prepared_steps) >= 256:
            backends.prepared_steps.clear()
        backends.prepared_steps[signature] = run
    return run


def step_function(tensors: RuleTensors, state: StepState, settings: StepSettings) -> StepFunction:
    """The step for tensors like these, checked."""
    if torch.compiler.is_compiling():
        return _prepared_step(tensors, state, settings)
    requested = backends.requested_backend(settings.backend)  # MDN_BACKEND may change between two steps
    key = (settings, type(settings.scale), requested)  # True == 1, but only one of them is a scale
    run = prepared_once(key, tensors, state, _prepared_step, tensors, state, settings)
    S, M, _ = state
    if M is not None:
        check_apart("S and M of the state", S, M)  # an address is no part of the signature
    return run


def _prepared_step(tensors: RuleTensors, state: StepState, settings: StepSettings) -> StepFunction:
    """Checks everything but values and binds what does not change."""
    checks.check_tensors(tensors, rank=3, vector=settings.vector)
    checks.check_step_state(state, tensors)
    if state.state_indices is not None:
        slots = check_state_indices(state.state_indices, state.S, len(tensors.v), read=False)
        state = state._replace(state_indices=slots)
    lookahead = settings.lookahead
    p_times_alpha = checks.check_probe(settings.p_times_alpha, lookahead)
    if state.M is None and lookahead:  # alpha S - beta mu M = alpha S
        lookahead, p_times_alpha = False, True
    scale = check_scale(settings.scale, tensors.q)
    options = RuleOptions(scale, l2norm=settings.l2norm, p_times_alpha=p_times_alpha, lookahead=lookahead)
    features, family = features_of(tensors, lookahead), tensors.family
    chosen = backends.resolve(settings.backend, tensors.q, family, tensors.v, features=features)
    chosen = backends.with_states(chosen, settings.backend, state.S, state.M)
    flags = (options.scale, options.l2norm, options.p_times_alpha, lookahead, chosen)

    def as_op(tensors: RuleTensors, state: StepState) -> Tensor:
        o: Tensor = custom_op.momentum_delta_step(*tensors.of_tokens, *state, *flags)
        return o

    if torch.compiler.is_compiling() or tensors.q.device.type == "meta" or not in_plain_memory((*tensors, *state)):
        return as_op
    module = backends.backend_module(chosen, family)
    prepare = getattr(module, "prepared_step", None)
    prepared: StepFunction | None = None if prepare is None else prepare(tensors, state, options)
    if prepared is not None:
        return prepared

    def run(tensors: RuleTensors, state: StepState) -> Tensor:
        # A recording (mdn.ops.cpu.program) sees what torch and the native kernel do. Of the others it sees the op only.
        if chosen not in ("torch", "cpu") and torch._C._len_torch_dispatch_stack() > 0:
            return as_op(tensors, state)
        with torch.no_grad(), without_autocast(tensors.q):
            o: Tensor = module.step_(tensors, state, options)
        if chosen not in ("torch", "cpu"):  # torch and the native kernel count it themselves
            torch.autograd.graph.increment_version([x for x in (state.S, state.M) if x is not None])
        return o

    return run

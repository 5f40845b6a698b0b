"""A rule over token ranges that different processes hold.

The state X ``[rows, V]`` of a head (rows = K, or 2K for S above M) after a range is an affine map of the state before
it, and so are the outputs, because every rule is linear in its state and its value columns never mix:

    X' = E + A X        o_t = o_t(X = 0) + C_t X

Calls of the rule give all three, without gradients: with the values and no incoming state E, and with zero values and
the identity as the initial state (``rows`` columns) A and C. Where only states are needed, the rule is told so: outputs
are a third of its work. The ranges exchange (A, E), fold what lies to their left into their incoming state X, and run
the ordinary rule from it. A document that begins inside a range starts from its own state, so that A of the range is
zero.

In the backward pass a range needs the gradient G of the state that it passes on. F = sum_t C_t^T grad_o_t + A^T grad_X'
is what its own tokens and states contribute to the gradient of X; the ranges exchange F from right to left, and then
run the ordinary backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.shared_checks import without_autocast

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan
    from mdn.parallel.exchange import Exchanged

TokenTensors = Mapping[str, Tensor | None]
"""the tensors ``[1, T, ...]`` of a call by name; the values are ``v``"""
RangeRule = Callable[[TokenTensors, Tensor | None, SequenceBoundaries, bool], "RangeOutput"]
"""of the tensors, the initial states ``[N, HV, rows, V]``, where the sequences begin, and whether outputs are needed"""


class RangeOutput(NamedTuple):
    o: Tensor
    """[1, T, HV, V]; perhaps an empty tensor if outputs were not needed"""
    X: Tensor
    """[N, HV, rows, V]: the states after the last tokens"""


class _Active:
    plan: ContextParallelPlan | None = None


def requested_plan(
    given: ContextParallelPlan | None, cu_seqlens: Tensor | SequenceBoundaries | None
) -> ContextParallelPlan | None:
    """The plan of this call: the given one, or that of the surrounding ``mdn.parallel.context_parallel``."""
    plan = _Active.plan if given is None else given
    if plan is not None and cu_seqlens is not None:
        raise ValueError("cu_seqlens must not be given beside context_parallel: the plan knows the documents")
    return plan


def refuse_plan(function: str, instead: str) -> None:
    """For functions that cannot work on a part of a sequence."""
    if _Active.plan is not None:
        raise ValueError(f"{function} has no context-parallel form; {instead}")


@contextmanager
def active_plan(plan: ContextParallelPlan | None) -> Iterator[None]:
    """The plan that calls without one work with; None inside the calls that a plan itself makes."""
    before, _Active.plan = _Active.plan, plan
    try:
        yield
    finally:
        _Active.plan = before


def check_tokens(name: str, x: Tensor, plan: ContextParallelPlan) -> None:
    """``x`` must be ``[1, T, ...]`` with the T tokens that this rank holds."""
    if x.dim() < 2 or tuple(x.shape[:2]) != (1, plan.local_tokens):
        raise ValueError(
            f"{name} must begin with [1, {plan.local_tokens}], this rank's tokens of the context_parallel plan, got "
            f"{list(x.shape)}"
        )


def over_ranges(
    rule: RangeRule,
    tensors: TokenTensors,
    rows: int,
    plan: ContextParallelPlan,
    initial: Tensor | None,
    output_final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of this rank's tokens and, if requested, the states ``[N, HV, rows, V]`` after all documents, which every
    rank gets. ``initial``: the states before all documents, the same on every rank."""
    starts = None if initial is None else plan.initial_of_pieces(initial)
    with active_plan(None):
        if not plan.is_connected:
            o, X = rule(tensors, starts, plan.boundaries, True)
        else:
            o, X = _connected(rule, tensors, rows, plan, starts)
    return o, plan.final_of_documents(X, initial) if output_final else None


def _connected(
    rule: RangeRule, tensors: TokenTensors, rows: int, plan: ContextParallelPlan, starts: Tensor | None
) -> RangeOutput:
    continuing = [i for i, piece in enumerate(plan.pieces) if piece.continues]
    v = tensors["v"]
    assert v is not None
    if not continuing:  # every document here begins here: the ordinary pass is the summary
        o, X = rule(tensors, starts, plan.boundaries, True)
        nothing = X.new_zeros(plan.slots, X.shape[1], rows, rows)
        exchanged = plan.exchange(X.detach()[plan.last_pieces], nothing)
        return RangeOutput(*_Border.apply(o, X, None, None, exchanged, plan))  # type: ignore[no-untyped-call]
    slots = [slot for slot, number in enumerate(plan.own_ranges) if plan.continues[number]]
    transits = [plan.transits[plan.own_ranges[slot]] for slot in slots]
    given = (*tensors.values(), starts)
    has_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    chosen = [place for place in range(len(slots)) if has_backward or transits[place]]
    with torch.no_grad():
        E = _outgoing(rule, tensors, rows, plan, starts)
        A = E.new_zeros(plan.slots, v.shape[2], rows, rows)
        C = response_A = None
        if chosen:
            numbers = [continuing[place] for place in chosen]
            C, response_A = _response(rule, tensors, rows, plan, numbers, has_backward)
            for place, of_piece in zip(chosen, response_A):
                if transits[place]:
                    A[slots[place]] = of_piece
        exchanged = plan.exchange(E, A)
        incoming = exchanged.states[slots]
    if starts is None:
        starts = incoming.new_zeros(len(plan.pieces), *incoming.shape[1:])
    starts = starts.index_copy(0, _index(continuing, v), incoming.to(starts.dtype))
    o, X = rule(tensors, starts, plan.boundaries, True)
    if not has_backward:
        return RangeOutput(o, X)
    return RangeOutput(*_Border.apply(o, X, C, response_A, exchanged, plan))  # type: ignore[no-untyped-call]


class _Border(torch.autograd.Function):
    """The end of this rank's ranges: nothing to do forward; backward, the gradients of the states they pass on arrive.

    Every rank runs the backward pass, also one that nothing arrives at.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        X: Tensor,
        C: Tensor | None,
        A: Tensor | None,
        exchanged: Exchanged,
        plan: ContextParallelPlan,
    ) -> Any:
        ctx.save_for_backward(C, A)
        ctx.exchanged, ctx.plan = exchanged, plan
        return o.view_as(o), X.view_as(X)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_X: Tensor) -> Any:
        C, A = ctx.saved_tensors
        plan: ContextParallelPlan = ctx.plan
        F = grad_X.new_zeros(plan.slots, *grad_X.shape[1:])
        if C is not None:
            continuing = [i for i, piece in enumerate(plan.pieces) if piece.continues]
            slots = [slot for slot, number in enumerate(plan.own_ranges) if plan.continues[number]]
            grads = [grad_o[0, plan.pieces[i].start : plan.pieces[i].end] for i in continuing]
            parts = C[0].split([grad.shape[0] for grad in grads])
            with without_autocast(grad_X):
                for place, (part, grad) in enumerate(zip(parts, grads)):
                    own = torch.einsum("tha,thv->hav", part.to(F.dtype), grad.to(F.dtype))
                    F[slots[place]] = own + A[place].mT @ grad_X[continuing[place]]
        arriving = ctx.exchanged.gradients(F)
        return grad_o, grad_X.index_add(0, _index(plan.last_pieces, grad_X), arriving), None, None, None, None


def _outgoing(
    rule: RangeRule, tensors: TokenTensors, rows: int, plan: ContextParallelPlan, starts: Tensor | None
) -> Tensor:
    """E ``[slots, HV, rows, V]``: the states after the last pieces of this rank's ranges, if nothing came in."""
    chosen = [i for i in plan.last_pieces if plan.pieces[i].goes_on]
    v = tensors["v"]
    assert v is not None
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    E = v.new_zeros(plan.slots, v.shape[2], rows, v.shape[3], dtype=dtype)
    if chosen:
        tokens = _tokens(plan, chosen, v)
        own = None if starts is None else starts[chosen]
        lengths = SequenceBoundaries.from_lengths([_length(plan, i) for i in chosen], v.device)
        X = rule(_part(tensors, tokens), own, lengths, False).X
        E[[plan.last_pieces.index(i) for i in chosen]] = X
    return E


def _response(
    rule: RangeRule, tensors: TokenTensors, rows: int, plan: ContextParallelPlan, numbers: list[int], outputs: bool
) -> RangeOutput:
    """C ``[1, T', HV, rows]`` (if needed) and A ``[n, HV, rows, rows]`` of some pieces."""
    v = tensors["v"]
    assert v is not None
    tokens = _tokens(plan, numbers, v)
    parts = _part(tensors, tokens) | {"v": v.new_zeros(1, tokens.numel(), v.shape[2], rows)}
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    identity = torch.eye(rows, dtype=dtype, device=v.device).expand(len(numbers), v.shape[2], rows, rows)
    lengths = SequenceBoundaries.from_lengths([_length(plan, i) for i in numbers], v.device)
    return rule(parts, identity, lengths, outputs)


def _part(tensors: TokenTensors, tokens: Tensor) -> dict[str, Tensor | None]:
    """All tensors of a call at some of its tokens."""
    v = tensors["v"]
    assert v is not None
    if tokens.numel() == v.shape[1]:
        return dict(tensors)
    return {name: None if x is None else x.index_select(1, tokens) for name, x in tensors.items()}


def _length(plan: ContextParallelPlan, number: int) -> int:
    return plan.pieces[number].end - plan.pieces[number].start


def _index(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _tokens(plan: ContextParallelPlan, numbers: list[int], like: Tensor) -> Tensor:
    """The places of some pieces' tokens among those of this rank."""
    pieces = (plan.pieces[i] for i in numbers)
    return torch.cat([torch.arange(piece.start, piece.end, device=like.device) for piece in pieces])

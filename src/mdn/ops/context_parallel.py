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
from dataclasses import dataclass
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
    call = _LocalCall(rule, tensors, rows, plan, starts)
    with active_plan(None):
        if not plan.is_connected:
            o, X = call.whole(starts)
        elif not plan.continuing:
            o, X = _first_of_all(call)
        else:
            o, X = _after_others(call)
    return o, plan.final_of_documents(X, initial) if output_final else None


@dataclass(frozen=True)
class _LocalCall:
    """A rule on this rank's tokens, or on some of its pieces."""

    rule: RangeRule
    tensors: TokenTensors
    rows: int
    plan: ContextParallelPlan
    starts: Tensor | None
    """[pieces, HV, rows, V]: what the pieces start from, zeros where it comes from another range; None: zeros"""

    @property
    def v(self) -> Tensor:
        v = self.tensors["v"]
        assert v is not None
        return v

    @property
    def needs_backward(self) -> bool:
        given = (*self.tensors.values(), self.starts)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)

    def zeros(self, count: int, columns: int) -> Tensor:
        """States ``[count, HV, rows, columns]`` in the dtype of the computation."""
        dtype = torch.float64 if self.v.dtype == torch.float64 else torch.float32
        return self.v.new_zeros(count, self.v.shape[2], self.rows, columns, dtype=dtype)

    def whole(self, starts: Tensor | None) -> RangeOutput:
        return self.rule(self.tensors, starts, self.plan.boundaries, True)

    def outgoing(self) -> Tensor:
        """E ``[slots, HV, rows, V]``: the states that this rank's ranges pass on, if nothing came in."""
        E = self.zeros(self.plan.slots, self.v.shape[3])
        numbers = {slot: n for slot, n in enumerate(self.plan.last_pieces) if self.plan.pieces[n].goes_on}
        if numbers:
            pieces = list(numbers.values())
            starts = None if self.starts is None else self.starts[pieces]
            E[list(numbers)] = self._on_pieces(self.tensors, pieces, starts, outputs=False).X
        return E

    def response(self, pieces: list[int], outputs: bool) -> RangeOutput:
        """C ``[1, T', HV, rows]`` (if needed) and A ``[n, HV, rows, rows]`` of some pieces."""
        zero_values = self.v.new_zeros(*self.v.shape[:3], self.rows)
        starts = self.zeros(len(pieces), self.rows)
        starts.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return self._on_pieces({**self.tensors, "v": zero_values}, pieces, starts, outputs)

    def _on_pieces(
        self, tensors: TokenTensors, numbers: list[int], starts: Tensor | None, outputs: bool
    ) -> RangeOutput:
        pieces = [self.plan.pieces[n] for n in numbers]
        if len(pieces) < len(self.plan.pieces):
            places = [torch.arange(piece.start, piece.end, device=self.v.device) for piece in pieces]
            tokens = torch.cat(places)
            tensors = {name: None if x is None else x.index_select(1, tokens) for name, x in tensors.items()}
        lengths = [piece.end - piece.start for piece in pieces]
        return self.rule(tensors, starts, SequenceBoundaries.from_lengths(lengths, self.v.device), outputs)


def _first_of_all(call: _LocalCall) -> RangeOutput:
    """Every document here begins here: the ordinary pass is the summary."""
    plan = call.plan
    o, X = call.whole(call.starts)
    exchanged = plan.exchange(X.detach()[plan.last_pieces], call.zeros(plan.slots, call.rows))
    return RangeOutput(*_Border.apply(o, X, None, None, exchanged, plan))  # type: ignore[no-untyped-call]


def _after_others(call: _LocalCall) -> RangeOutput:
    """A summary, the exchange, and the ordinary pass from what has arrived."""
    plan, needs_backward = call.plan, call.needs_backward
    # In the backward pass every piece that continues has something to send to the left.
    responding = [entry for entry in plan.continuing if entry.transits or needs_backward]
    C = A = None
    with torch.no_grad():
        sent_A = call.zeros(plan.slots, call.rows)
        if responding:
            C, A = call.response([entry.piece for entry in responding], needs_backward)
            for entry, of_piece in zip(responding, A):
                if entry.transits:
                    sent_A[entry.slot] = of_piece
        exchanged = plan.exchange(call.outgoing(), sent_A)
        arrived = exchanged.states[[entry.slot for entry in plan.continuing]]
    starts = call.zeros(len(plan.pieces), call.v.shape[3]) if call.starts is None else call.starts
    places = torch.tensor([entry.piece for entry in plan.continuing], device=starts.device)
    o, X = call.whole(starts.index_copy(0, places, arrived.to(starts.dtype)))
    if not needs_backward:
        return RangeOutput(o, X)
    return RangeOutput(*_Border.apply(o, X, C, A, exchanged, plan))  # type: ignore[no-untyped-call]


class _Border(torch.autograd.Function):
    """The end of this rank's ranges: nothing to do forward; backward, the gradients of the states they pass on arrive.

    Every rank runs the backward pass, also one that nothing arrives at.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,  # [1, T, HV, V]
        X: Tensor,  # [pieces, HV, rows, V]
        C: Tensor | None,  # [1, T', HV, rows] of the pieces that continue, one after the other
        A: Tensor | None,  # [continuing, HV, rows, rows]
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
            pieces = [plan.pieces[entry.piece] for entry in plan.continuing]
            responses = C[0].split([piece.end - piece.start for piece in pieces])
            with without_autocast(grad_X):
                for entry, piece, of_outputs, of_state in zip(plan.continuing, pieces, responses, A):
                    grad = grad_o[0, piece.start : piece.end].to(F.dtype)
                    own = torch.einsum("tha,thv->hav", of_outputs.to(F.dtype), grad)
                    F[entry.slot] = own + of_state.mT @ grad_X[entry.piece]
        arriving = ctx.exchanged.gradients(F)
        last = torch.tensor(plan.last_pieces, device=grad_X.device)
        return grad_o, grad_X.index_add(0, last, arriving), None, None, None, None

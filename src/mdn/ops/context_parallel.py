"""A rule over token ranges that different processes hold.

The state X ``[rows, V]`` of a head (rows = K, or 2K for S above M) after a range is an affine map of the state before
it, and so are the outputs, because every rule is linear in its state and its value columns never mix:

    X' = E + A X        o_t = o_t(X = 0) + C_t X

Two calls of the ordinary rule give everything: with the values and no incoming state o(0) and E, and with zero values
and the identity as the initial state (``rows`` columns) C and A. The ranges exchange (A, E), fold what lies to their
left into their incoming state X, and add what follows from it. A document that begins inside a range starts from its
own state, so that A of the range is zero. Everything here is differentiable; the exchange knows its own backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.shared_checks import without_autocast

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

TokenTensors = Mapping[str, Tensor | None]
"""the tensors ``[1, T, ...]`` of a call by name; the values are ``v``"""
RangeRule = Callable[[TokenTensors, Tensor | None, SequenceBoundaries], "RangeOutput"]
"""of the tensors, the initial states ``[N, HV, rows, V]`` and where the sequences begin"""


class RangeOutput(NamedTuple):
    o: Tensor
    """[1, T, HV, V]"""
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
        o, X = rule(tensors, starts, plan.boundaries)
        if plan.is_connected:
            o, X = _continued(rule, tensors, rows, plan, RangeOutput(o, X))
    return o, plan.final_of_documents(X, initial) if output_final else None


def _continued(
    rule: RangeRule, tensors: TokenTensors, rows: int, plan: ContextParallelPlan, alone: RangeOutput
) -> RangeOutput:
    """What this rank's pieces compute with the states that arrive from the left, from what they compute without."""
    numbers = [i for i, piece in enumerate(plan.pieces) if piece.continues]
    slots = [slot for slot, number in enumerate(plan.own_ranges) if plan.continues[number]]
    response = _response(rule, tensors, rows, plan, numbers) if numbers else None
    nothing = alone.X.new_zeros(alone.X.shape[1], rows, rows)
    A = [nothing] * plan.slots
    for place, slot in enumerate(slots):
        if response is not None and plan.transits[plan.own_ranges[slot]]:
            A[slot] = response.X[place]
    o, incoming = plan.incoming_states(alone.o, alone.X[plan.last_pieces], torch.stack(A))
    if response is None:
        return RangeOutput(o, alone.X)
    incoming = incoming[slots]
    with without_autocast(o):
        parts = response.o[0].to(incoming.dtype).split([_length(plan, i) for i in numbers])
        added = torch.cat([torch.einsum("tha,hav->thv", C, X) for C, X in zip(parts, incoming)])
        o = o.to(incoming.dtype).index_add(1, _tokens(plan, numbers, o), added.unsqueeze(0)).to(o.dtype)
        X = alone.X.index_add(0, torch.tensor(numbers, device=o.device), response.X @ incoming)
    return RangeOutput(o, X)


def _response(
    rule: RangeRule, tensors: TokenTensors, rows: int, plan: ContextParallelPlan, numbers: list[int]
) -> RangeOutput:
    """C ``[1, T', HV, rows]`` and A ``[n, HV, rows, rows]`` of the pieces that continue a document."""
    v = tensors["v"]
    assert v is not None
    tokens = _tokens(plan, numbers, v)
    everything = tokens.numel() == v.shape[1]
    parts = {name: x if x is None or everything else x.index_select(1, tokens) for name, x in tensors.items()}
    parts["v"] = v.new_zeros(1, tokens.numel(), v.shape[2], rows)
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    identity = torch.eye(rows, dtype=dtype, device=v.device).expand(len(numbers), v.shape[2], rows, rows)
    lengths = [_length(plan, i) for i in numbers]
    return rule(parts, identity, SequenceBoundaries.from_lengths(lengths, v.device))


def _length(plan: ContextParallelPlan, number: int) -> int:
    return plan.pieces[number].end - plan.pieces[number].start


def _tokens(plan: ContextParallelPlan, numbers: list[int], like: Tensor) -> Tensor:
    """The places of some pieces' tokens among those of this rank."""
    pieces = (plan.pieces[i] for i in numbers)
    return torch.cat([torch.arange(piece.start, piece.end, device=like.device) for piece in pieces])

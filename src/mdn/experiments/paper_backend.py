"""The paper's log-domain arithmetic as a backend, to tell failures of arithmetic from those of dynamics.

    with paper_backend():
        train(recipe)                # whose model has backend: paper

Outside the block ``backend="paper"`` is refused like any unknown name. The backend trains: float32, one sequence per
row of the batch, no initial state, no decode steps. Its gradient is automatic differentiation of the paper's forward
formula; the authors' hand-written backward pass is not reproduced here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mdn.bench.paper_form import PaperOutput, masked_coefficients, paper_chunk_momentum_delta_rule
from mdn.ops.backends import registered_backend
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors, StepState

PAPER_BACKEND = "paper"
FORMULA_INPUTS = ("q", "k", "v", "log_alpha", "log_mu", "beta", "eta")


@contextmanager
def paper_backend() -> Iterator[None]:
    """``backend="paper"`` is known inside."""
    with registered_backend(PAPER_BACKEND, _PaperBackend, why_not=_why_not):
        yield


def _why_not(q: Tensor) -> str | None:
    return None if q.dtype == torch.float32 else f"the paper's arithmetic computes in float32, got {q.dtype}"


def _check(tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions) -> None:
    if tensors.initial_state is not None:
        raise ValueError("initial_state must be None with backend='paper': it is for training passes")
    if boundaries is not None:
        raise ValueError("cu_seqlens must be None with backend='paper'; set data.reset_at_documents=false")
    if tensors.p is not None or not options.p_times_alpha or not options.l2norm:
        raise ValueError("backend='paper' needs p = alpha k and normalised keys, as the paper has them")
    if tensors.v.shape[2] != tensors.k.shape[2]:
        raise ValueError(
            f"v must have as many heads as k with backend='paper', got {tensors.v.shape[2]} and {tensors.k.shape[2]}"
        )


class _PaperBackend:
    """The three functions of a momentum backend (see ``mdn.ops.momentum.interface``)."""

    @staticmethod
    def forward(
        tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
    ) -> ForwardResult:
        """Nothing is saved: backward computes the formula again."""
        _check(tensors, boundaries, options)
        o, final_state = _formula(options, *_inputs(tensors))
        return ForwardResult(o, final_state, o.new_empty(0))

    @staticmethod
    def backward(
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        tensors: RuleTensors,
        residual: Tensor,
        boundaries: SequenceBoundaries | None,
        options: RuleOptions,
    ) -> RuleTensors:
        # torch.func works inside a custom op, where autograd's own recording is switched off.
        pulled_back: Any = torch.func.vjp(lambda *inputs: _formula(options, *inputs), *_inputs(tensors))
        output, gradients_of = pulled_back
        if grad_final_state is None:
            grad_final_state = torch.zeros_like(output.final_state)
        grads = gradients_of(PaperOutput(grad_o, grad_final_state))
        return RuleTensors(p=None, **dict(zip(FORMULA_INPUTS, grads)))

    @staticmethod
    def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
        raise ValueError("backend='paper' has no decode step: it is for training passes")


def _inputs(tensors: RuleTensors) -> list[Tensor]:
    return [getattr(tensors, name) for name in FORMULA_INPUTS]


def _formula(options: RuleOptions, *inputs: Tensor) -> PaperOutput:
    """With the coefficients masked before the exponential, a concession to it: see ``masked_coefficients``."""
    return paper_chunk_momentum_delta_rule(*inputs, scale=options.scale, coefficients=masked_coefficients)

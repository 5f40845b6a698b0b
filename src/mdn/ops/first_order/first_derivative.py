"""Hand-written backward passes: computed without autocast, not differentiable themselves, and they say so.

``torch.autograd.function.once_differentiable`` returns gradients without edges to what they were computed from. So
``torch.autograd.grad(..., inputs=...)`` of such a gradient does not meet torch's error: it finds no path, and what it
returns lacks a term. Here every gradient has an edge to everything that it depends on, and whoever follows it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mdn.ops.shared_checks import without_autocast

MESSAGE = (
    "the chunkwise first-order rules have no second derivative; use the rule's recurrent_* function, which is plain "
    "torch"
)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the ``backward`` of a torch.autograd.Function from ``backward(ctx, saved, *gradients)``.

    ``saved`` are the tensors that forward saved: activation checkpointing allows them to be read only once.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad(), without_autocast(gradients[0]):
            found = backward(ctx, saved, *gradients)
        if not torch.is_grad_enabled():  # without create_graph they are not differentiated again
            return found
        depends_on = [x for x in (*gradients, *saved) if isinstance(x, Tensor) and x.requires_grad]
        with_edges: Any = _NotDifferentiable.apply
        results = iter(with_edges([x for x in found if isinstance(x, Tensor)], *depends_on))
        return tuple(next(results) if isinstance(x, Tensor) else x for x in found)

    return run


class _NotDifferentiable(torch.autograd.Function):
    """The given tensors with edges to all they depend on; following an edge raises."""

    @staticmethod
    def forward(ctx: Any, found: list[Tensor], *depends_on: Tensor) -> Any:
        return tuple(x.detach() for x in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(MESSAGE)

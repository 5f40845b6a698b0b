"""Matrix products and triangular solves whose backward passes leave autocast too.

A chunkwise form leaves autocast while it computes. But what autograd derives from it runs where ``backward()`` is
called, and inside an autocast block torch would round the products there to bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdn.ops.shared_checks import without_autocast


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, ``[..., I, J]`` and ``[..., J, L]`` with the same leading dimensions."""
    multiply: Any = _Product.apply
    product: Tensor = multiply(x, y)
    return product


def solve_unit_lower(erase: Tensor, values: Tensor, probes: Tensor) -> tuple[Tensor, Tensor]:
    """(I + erase)^-1 applied to values ``[..., C, V]`` and probes ``[..., C, K]`` by substitution."""
    solve: Any = _UnitLowerSolution.apply
    both: Tensor = solve(erase, torch.cat([values, probes], -1))
    values, probes = both.split([values.shape[-1], probes.shape[-1]], -1)
    return values, probes


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        with without_autocast(grad):
            grad_x = grad @ y.mT if ctx.needs_input_grad[0] else None
            grad_y = x.mT @ grad if ctx.needs_input_grad[1] else None
        return grad_x, grad_y


class _UnitLowerSolution(torch.autograd.Function):
    """X with (I + erase) X = given; only what lies below the diagonal of erase is read."""

    @staticmethod
    def forward(ctx: Any, erase: Tensor, given: Tensor) -> Tensor:
        X: Tensor = torch.linalg.solve_triangular(erase, given, upper=False, unitriangular=True)
        ctx.save_for_backward(erase, X)
        return X

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        erase, X = ctx.saved_tensors
        with without_autocast(grad):
            grad_given = torch.linalg.solve_triangular(erase.mT, grad, upper=True, unitriangular=True)
            grad_erase = -(grad_given @ X.mT).tril(-1)
        return grad_erase, grad_given

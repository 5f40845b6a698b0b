"""The first-order rules by name: their public functions, and their arguments without the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance import public_function
from definition import FIRST_ORDER as RULES
from definition import VECTOR_DECAY as VECTOR
from definition import Draw, Tensors, make_inputs

__all__ = ["RULES", "VECTOR", "arguments", "chunk", "flat", "random_state", "recurrent", "step"]


def chunk(rule: str) -> Callable[..., Any]:
    return public_function(rule, "chunk")


def recurrent(rule: str) -> Callable[..., Any]:
    return public_function(rule, "recurrent")


def step(rule: str) -> Callable[..., Any]:
    return public_function(rule, "step")


def arguments(
    rule: str,
    B: int = 2,
    T: int = 70,
    H: int = 2,
    HV: int = 2,
    K: int = 8,
    V: int = 6,
    gates: str = "mixed",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Tensors:
    """All in the given dtype."""
    made = make_inputs(rule, B, T, H, HV, K, V, gates=gates, with_state=False, seed=seed, dtype=torch.float64)
    return {name: x.to(dtype) for name, x in made.items()}


def random_state(rule: str, N: int, HV: int = 2, K: int = 8, V: int = 6, dtype: torch.dtype = torch.float64):
    """[N, HV, K, V]; linear attention's comes with its normaliser [N, 1, HV, K]."""
    draw = Draw(7)
    state = draw.normal(N, HV, K, V).to(dtype)
    return (state, draw.uniform(N, 1, HV, K).to(dtype)) if rule == "linear_attn" else state


def flat(state: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """A state as one tensor."""
    return torch.cat([part.flatten(1) for part in state], 1) if isinstance(state, tuple) else state.flatten(1)

"""The settings of one call of the momentum delta rule that are not tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RuleOptions:
    scale: float
    """factor on the read-out, K ** -0.5 unless given"""
    chunk_size: int = 64
    """tokens per chunk; the result does not depend on it"""
    l2norm: bool = True
    """L2-normalise q, k and (if given) p"""
    p_times_alpha: bool = True
    """the error is read at the decayed state: p = alpha * p"""


def compute_dtype(q: Tensor) -> torch.dtype:
    """Coefficients, decays, solves and states: float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32

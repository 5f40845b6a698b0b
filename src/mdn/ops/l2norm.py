"""The one L2 norm of this project: ``x * rsqrt(sum x^2 + 1e-6)`` over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)

"""RMS norm, and the head-wise RMS norm with an output gate that ends every recurrent mixer.

    rms(x) = x / sqrt(mean(x^2) + eps) * weight        gated(x, g) = rms(x) * activation(g)

The statistics are computed in float32 (float64 for float64 inputs) and the result has the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "swish": F.silu, "silu": F.silu}


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """x and gate ``[..., HV, V]``; the norm runs over V, one weight shared by all heads."""

    def __init__(self, dim: int, eps: float = 1e-6, activation: str = "sigmoid"):
        super().__init__(dim, eps)
        if activation not in GATE_ACTIVATIONS:
            raise ValueError(f"the gate's activation must be one of {sorted(GATE_ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * GATE_ACTIVATIONS[self.activation](gate)

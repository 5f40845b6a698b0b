"""RMS norm, and the head-wise RMS norm with an output gate that ends every recurrent mixer.

    rms(x) = x / sqrt(mean(x^2) + eps) * weight        gated(x, g) = rms(x) * activation(g)

The statistics are computed in float32 (float64 for float64 inputs) and the result has the input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mdn.ops.fused import ACTIVATIONS, gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """x and gate ``[..., HV, V]``; the norm runs over V, one weight shared by all heads."""

    def __init__(self, dim: int, eps: float = 1e-6, activation: str = "sigmoid"):
        super().__init__(dim, eps)
        if activation not in ACTIVATIONS:
            raise ValueError(f"the gate's activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return gated_rms_norm(x, gate, self.weight, self.eps, self.activation)

"""The stability-aware gates of MDN (section 3.3 of the paper).

From four projections of the token (a, b, m, e, each ``[..., HV]``) and per-head parameters:

    eta       = 1 + tanh(e / tau)                      in (0, 2)
    alpha_max = cos^2(theta), beta_max = sin^2(theta)  with theta = atan(eta * s), s = exp(log_factor)
    log alpha = log alpha_max - exp(A_log)  * softplus(a + dt_bias)
    log mu    = max(min_log_mu, - exp(Mu_log) * softplus(m + mu_bias))
    beta      = beta_max * sigmoid(b)

With x = eta s the bounds are exactly 1 / (1 + x^2) and x^2 / (1 + x^2), which is how they are computed: no
trigonometry, and log alpha_max = -log1p(x^2) keeps its accuracy near 0. Per-head parameters have one entry per key
head (A_log, Mu_log, log_factor) or per value head (dt_bias, mu_bias). Everything is float32, or float64 in float64
models. Without m (the ablation use_momentum=False) mu is exactly 0, log mu = -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gates(NamedTuple):
    """The four gates of every token and value head, ``[..., HV]``."""

    log_alpha: Tensor
    log_mu: Tensor
    beta: Tensor
    eta: Tensor


@dataclass(frozen=True)
class GateSettings:
    """Which parts of the parameterisation are on; every ablation of the paper is one field."""

    tau: float
    """temperature of eta"""
    min_log_mu: float | None = -2.0
    """lower clamp of log mu; None: no clamp"""
    bound_alpha: bool = True
    """False: alpha_max = 1"""
    bound_beta: bool = True
    """False: beta_max = 1"""
    eta_activation: str = "tanh"
    """"tanh": 1 + tanh(x); "sigmoid": 2 sigmoid(x)"""
    allow_neg_eigval: bool = False
    """doubles beta (an extra of FLA's layer, outside the paper's stability argument)"""

    def __post_init__(self) -> None:
        if self.eta_activation not in ("tanh", "sigmoid"):
            raise ValueError(f"eta_activation must be 'tanh' or 'sigmoid', got {self.eta_activation!r}")
        if self.min_log_mu is not None and not self.min_log_mu <= 0:
            raise ValueError(f"min_log_mu must be None or a number <= 0, got {self.min_log_mu}")
        if not self.tau > 0:
            raise ValueError(f"tau must be positive, got {self.tau}")


class StabilityGates(nn.Module):
    """Maps projections to :class:`Gates`. It owns no parameters (they keep their names in the layer), so it is also the
    place for a forward hook that watches the gates: ``layer.gate_map.register_forward_hook(...)`` receives them."""

    def __init__(self, settings: GateSettings):
        super().__init__()
        self.settings = settings

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        m: Tensor | None,
        e: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        Mu_log: Tensor | None,
        mu_bias: Tensor | None,
        log_factor: Tensor | None,
    ) -> Gates:
        settings = self.settings
        dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        a, b, e, dt_bias = a.to(dtype), b.to(dtype), e.to(dtype), dt_bias.to(dtype)
        eta = (
            1 + torch.tanh(e / settings.tau)
            if settings.eta_activation == "tanh"
            else 2 * torch.sigmoid(e / settings.tau)
        )
        log_alpha = -_scale(A_log, a) * F.softplus(a + dt_bias)
        beta = torch.sigmoid(b)
        if log_factor is not None:
            squared_tangent = (eta * _scale(log_factor, a)).square()
            if settings.bound_alpha:
                log_alpha = log_alpha - torch.log1p(squared_tangent)
            if settings.bound_beta:
                beta = beta * (squared_tangent / (1 + squared_tangent))
        if settings.allow_neg_eigval:
            beta = 2 * beta
        if m is None or Mu_log is None or mu_bias is None:
            return Gates(log_alpha, torch.full_like(log_alpha, -math.inf), beta, eta)
        m = m.to(dtype)
        log_mu = -_scale(Mu_log, m) * F.softplus(m + mu_bias.to(dtype))
        return Gates(
            log_alpha, log_mu if settings.min_log_mu is None else log_mu.clamp_min(settings.min_log_mu), beta, eta
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.settings).items())


def _scale(log_parameter: Tensor, like: Tensor) -> Tensor:
    """exp of a per-key-head parameter, repeated for the value heads of its group."""
    return log_parameter.to(like.dtype).exp().repeat_interleave(like.shape[-1] // log_parameter.shape[0])

"""The stability-aware gates of MDN (section 3.3 of the paper).

From four projections of the token (a, b, m, e, each ``[..., HV]``) and per-head parameters:

    eta       = 1 + tanh(e / tau)                      in (0, 2)
    alpha_max = cos^2(theta), beta_max = sin^2(theta)  with theta = atan(eta * s), s = exp(log_factor)
    log alpha = log alpha_max - exp(A_log)  * softplus(a + dt_bias)
    log mu    = max(min_log_mu, - exp(Mu_log) * softplus(m + mu_bias))
    beta      = beta_max * sigmoid(b)

With x = eta s the bounds are exactly 1 / (1 + x^2) and x^2 / (1 + x^2), which is how they are computed: no
trigonometry, and log alpha_max = -log1p(x^2) keeps its accuracy near 0. Per-head parameters have one entry per key
head (A_log, Mu_log, log_factor) or per value head (dt_bias, mu_bias). Everything is float32, or float64 for float64 models.
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
    use_momentum: bool = True
    """False: mu = 0 exactly (log mu = -inf)"""
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
        value_heads = a.shape[-1]

        def per_value_head(parameter: Tensor) -> Tensor:
            """exp of a per-key-head parameter, repeated for the value heads of its group."""
            return parameter.to(dtype).exp().repeat_interleave(value_heads // parameter.shape[0])

        e = e.to(dtype) / settings.tau
        eta = 1 + torch.tanh(e) if settings.eta_activation == "tanh" else 2 * torch.sigmoid(e)
        log_alpha = -per_value_head(A_log) * F.softplus(a.to(dtype) + dt_bias.to(dtype))
        beta = torch.sigmoid(b.to(dtype))
        if log_factor is not None:
            squared_tangent = (eta * per_value_head(log_factor)).square()
            if settings.bound_alpha:
                log_alpha = log_alpha - torch.log1p(squared_tangent)
            if settings.bound_beta:
                beta = beta * (squared_tangent / (1 + squared_tangent))
        if settings.allow_neg_eigval:
            beta = 2 * beta
        return Gates(log_alpha, self._log_mu(m, Mu_log, mu_bias, log_alpha, per_value_head), beta, eta)

    def _log_mu(self, m, Mu_log, mu_bias, like: Tensor, per_value_head) -> Tensor:
        if not self.settings.use_momentum:
            return torch.full_like(like, -math.inf)
        log_mu = -per_value_head(Mu_log) * F.softplus(m.to(like.dtype) + mu_bias.to(like.dtype))
        return log_mu if self.settings.min_log_mu is None else log_mu.clamp_min(self.settings.min_log_mu)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.settings).items())

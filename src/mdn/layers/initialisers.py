"""Where every parameter's first value comes from: one table of named initialisers.

An initialiser maps (parameter, module, config) to a new tensor of the parameter's shape. Nothing is computed in a
constructor that is not also here, so a model built on the meta device, moved with ``to_empty`` and initialised from
this table equals one that was built directly. Values of the gate parameters follow the authors' released code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mdn.layers.norms import RMSNorm
from mdn.layers.short_conv import ShortConvolution

Initialiser = Callable[[Tensor, nn.Module, Any], Tensor]
SMALLEST = 1e-6  # keeps log U(0, x) away from log 0
DEFAULT_STD = 0.02


def normal(parameter: Tensor, module: nn.Module, config: Any) -> Tensor:
    """N(0, initializer_range), with a zero row for the padding token of an embedding."""
    value = torch.randn_like(parameter) * getattr(config, "initializer_range", DEFAULT_STD)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        value[module.padding_idx] = 0
    return value


def ones(parameter: Tensor, module: nn.Module, config: Any) -> Tensor:
    return torch.ones_like(parameter)


def zeros(parameter: Tensor, module: nn.Module, config: Any) -> Tensor:
    return torch.zeros_like(parameter)


def log_of_uniform(high: float) -> Initialiser:
    """log U(0, high): a positive per-head scale, stored as its logarithm."""

    def initialiser(parameter: Tensor, module: nn.Module, config: Any) -> Tensor:
        return (torch.rand_like(parameter) * high).clamp_min(SMALLEST).log()

    return initialiser


def inverse_softplus_time_step(parameter: Tensor, module: nn.Module, config: Any) -> Tensor:
    """b with softplus(b) = dt, dt log-uniform in [1e-3, 1e-1] (the time step of Mamba2 and Gated DeltaNet)."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = (torch.rand_like(parameter) * (high - low) + low).exp()
    return dt + torch.log(-torch.expm1(-dt))


def same_as(name: str) -> Initialiser:
    """The value of another parameter of the same module, which is initialised first."""

    def initialiser(parameter: Tensor, module: nn.Module, config: Any) -> Tensor:
        return getattr(module, name).detach().clone()

    return initialiser


INITIALISERS: dict[str, Initialiser] = {
    "normal": normal,
    "ones": ones,
    "zeros": zeros,
    "log U(0, 1)": log_of_uniform(1.0),
    "log U(0, 4)": log_of_uniform(4.0),
    "log U(0, 16)": log_of_uniform(16.0),
    "inverse softplus of dt": inverse_softplus_time_step,
    "same as dt_bias": same_as("dt_bias"),
}

# (class of the module that owns the parameter, or its name; parameter name) -> initialiser.
# Classes are matched with isinstance and earlier rows win.
TABLE: list[tuple[type | str, str, str]] = [
    ("MomentumDeltaNet", "A_log", "log U(0, 16)"),
    ("MomentumDeltaNet", "Mu_log", "log U(0, 16)"),
    ("MomentumDeltaNet", "dt_bias", "inverse softplus of dt"),
    ("MomentumDeltaNet", "mu_bias", "same as dt_bias"),
    ("MomentumDeltaNet", "log_factor", "log U(0, 4)"),
    ("MomentumDeltaNet", "D_log", "log U(0, 1)"),
    (ShortConvolution, "weight", "normal"),
    (ShortConvolution, "bias", "zeros"),
    (RMSNorm, "weight", "ones"),
    (nn.Linear, "weight", "normal"),
    (nn.Linear, "bias", "zeros"),
    (nn.Embedding, "weight", "normal"),
]


def initialiser_name(module: nn.Module, parameter_name: str) -> str:
    """The name of the initialiser of ``module.parameter_name``; a parameter without a row is an error."""
    for owner, name, initialiser in TABLE:
        owned = type(module).__name__ == owner if isinstance(owner, str) else isinstance(module, owner)
        if owned and name == parameter_name:
            return initialiser
    raise ValueError(
        f"no initialiser for {type(module).__name__}.{parameter_name}: add a row to mdn.layers.initialisers.TABLE"
    )


@torch.no_grad()
def initialise(module: nn.Module, config: Any = None, keep: Callable[[Tensor], bool] = lambda parameter: False) -> None:
    """Writes fresh values into the parameters that ``module`` itself owns (not its children's).

    ``keep(parameter)`` True leaves it alone, as for parameters that a checkpoint already filled.
    """
    owned = dict(module.named_parameters(recurse=False))
    names = {name: initialiser_name(module, name) for name in owned}
    # parameters that copy another one come after it
    for name in sorted(owned, key=lambda name: names[name].startswith("same as")):
        if not keep(owned[name]):
            owned[name].copy_(INITIALISERS[names[name]](owned[name], module, config))

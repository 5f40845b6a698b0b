"""Where every parameter's initial value comes from: one table of named initialisers.

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

from mdn.layers.conv import ShortConvolution
from mdn.layers.norms import RMSNorm

Initialiser = Callable[[Tensor, Any, Any], Tensor]
SMALLEST = 1e-6  # keeps log U(0, x) away from log 0
DEFAULT_STD = 0.02


def normal(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """N(0, initializer_range), with a zero row for the padding token of an embedding."""
    value = torch.randn_like(parameter) * getattr(config, "initializer_range", DEFAULT_STD)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        value[module.padding_idx] = 0
    return value


def ones(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return torch.ones_like(parameter)


def zeros(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return torch.zeros_like(parameter)


def log_of_uniform(high: float, low: float = 0.0) -> Initialiser:
    """log U(low, high): a positive per-head scale, stored as its logarithm."""

    def initialiser(parameter: Tensor, module: Any, config: Any) -> Tensor:
        return (torch.rand_like(parameter) * (high - low) + low).clamp_min(SMALLEST).log()

    return initialiser


def log_uniform(parameter: Tensor, low: float, high: float) -> Tensor:
    """Log-uniform in [low, high]."""
    log_low, log_high = math.log(low), math.log(high)
    return (torch.rand_like(parameter) * (log_high - log_low) + log_low).exp()


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def inverse_softplus_time_step(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """b with softplus(b) = dt, dt log-uniform in [1e-3, 1e-1] (the time step of Mamba2 and Gated DeltaNet)."""
    return inverse_softplus(log_uniform(parameter, 1e-3, 1e-1))


def momentum_time_step(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """``mu_init`` of the MDN layer: b with softplus(b) = c dt for a number c, and with exp(Mu_log) softplus(b), the
    decay rate of the momentum, log-uniform for a pair. c = 1 copies dt_bias, as the released code does."""
    dt_bias: Tensor = module.dt_bias.detach()
    if module.mu_init == 1:
        return dt_bias.clone()
    if isinstance(module.mu_init, tuple):
        per_value_head = module.Mu_log.exp().repeat_interleave(parameter.shape[0] // module.Mu_log.shape[0])
        return inverse_softplus(log_uniform(parameter, *module.mu_init) / per_value_head)
    return inverse_softplus(module.mu_init * nn.functional.softplus(dt_bias))


def log_of_initial_factor(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """``log_factor_init`` of the MDN layer: log of U(0, c) for a number c (4 in the released code), log of a
    log-uniform number for a pair."""
    if isinstance(module.log_factor_init, tuple):
        return log_uniform(parameter, *module.log_factor_init).log()
    return log_of_uniform(module.log_factor_init)(parameter, module, config)


def checked_initial_range(name: str, value: Any) -> float | tuple[float, ...]:
    """A positive number, or a pair of increasing ones as a tuple (JSON and YAML give a list)."""
    is_pair = isinstance(value, list | tuple)
    numbers = tuple(value) if is_pair else (value,)
    positive = all(type(x) in (int, float) and 0 < x < math.inf for x in numbers)
    if not positive or (is_pair and not (len(numbers) == 2 and numbers[0] < numbers[1])):
        raise ValueError(f"{name} must be a positive number or a pair [low, high] with 0 < low < high, got {value!r}")
    return numbers if is_pair else numbers[0]


def correction_factor(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """The constant that Comba's query correction starts with."""
    return torch.full_like(parameter, float(module.correction_factor))


def scaled_by_depth(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """Uniform with standard deviation 1 / sqrt(3 fan_in layers): the residual sum does not grow with the depth."""
    bound = 1 / math.sqrt(parameter.shape[1] * getattr(config, "num_hidden_layers", 1))
    return torch.empty_like(parameter).uniform_(-bound, bound)


# ------------------------------------------------------------------------------------------------------------- RWKV-7
# Curves over the channels, which bend with the depth of the layer. What depends on the layer is kept in the modules as
# plain numbers (``gain``, ``initial_weight``, ``layer_idx``) or as a function without arguments (``bias_curve``).


def orthogonal(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """An orthogonal matrix times the module's ``gain``, computed in float32; zeros for a gain of 0."""
    value = torch.zeros(parameter.shape, device=parameter.device)
    return nn.init.orthogonal_(value, gain=module.gain) if module.gain else value


def bias_curve(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return torch.zeros_like(parameter) if module.bias_curve is None else module.bias_curve()


def initial_weight(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return torch.full_like(parameter, module.initial_weight)


def token_mix(exponent: float) -> Initialiser:
    """1 - (channel / channels)^(exponent * share of the layers still to come)."""

    def initialiser(parameter: Tensor, module: Any, config: Any) -> Tensor:
        channels = parameter.numel()
        to_come = 1 - (module.layer_idx or 0) / module.num_hidden_layers
        curve: Tensor = 1 - (torch.arange(channels) / channels) ** (exponent * to_come)
        return curve.reshape(parameter.shape)

    return initialiser


def channel_mix(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """1 - (channel / channels)^(share of the layers still to come, to the fourth)."""
    channels = parameter.numel()
    to_come = 1 - module.layer_idx / module.num_hidden_layers
    curve: Tensor = 1 - (torch.arange(channels) / channels) ** (to_come**4)
    return curve


def key_scale(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return 0.71 - 0.1 * centred(parameter.numel())


def constant(value: float) -> Initialiser:
    def initialiser(parameter: Tensor, module: Any, config: Any) -> Tensor:
        return torch.full_like(parameter, value)

    return initialiser


def decay_bias(channels: int, head_dim: int, depth: float) -> Tensor:
    """Slow to fast over the channels, steeper in deeper layers (depth 0 to 1), with a zigzag inside every head."""
    ramp: Tensor = -6 + 6 * (torch.arange(channels) / max(1, channels - 1)) ** (1 + depth**0.3)
    return ramp + 0.5 + 2.5 * zigzag(channels, head_dim)


def rate_bias(channels: int, head_dim: int) -> Tensor:
    return -0.19 + 0.3 * zigzag(channels, head_dim) + 0.4 * centred(channels)


def value_bias(channels: int) -> Tensor:
    return 0.73 - 0.4 * centred(channels)


def centred(channels: int) -> Tensor:
    """From -1/2 to 1/2."""
    return torch.arange(channels) / max(1, channels - 1) - 0.5


def zigzag(channels: int, head_dim: int) -> Tensor:
    """From -1 to 1 inside every head, flat in the middle."""
    half = max(1, head_dim - 1) / 2
    place = (torch.arange(channels) % head_dim - half) / half
    return place * place.abs()


INITIALISERS: dict[str, Initialiser] = {
    "normal": normal,
    "ones": ones,
    "zeros": zeros,
    "log U(0, 1)": log_of_uniform(1.0),
    "log U(0, 16)": log_of_uniform(16.0),
    "log U(1, 16)": log_of_uniform(16.0, 1.0),
    "inverse softplus of dt": inverse_softplus_time_step,
    "mu_init": momentum_time_step,
    "log_factor_init": log_of_initial_factor,
    "correction factor": correction_factor,
    "scaled by depth": scaled_by_depth,
    "RWKV-7 orthogonal": orthogonal,
    "RWKV-7 bias": bias_curve,
    "RWKV-7 norm": initial_weight,
    "RWKV-7 mix 0.2": token_mix(0.2),
    "RWKV-7 mix 0.7": token_mix(0.7),
    "RWKV-7 mix 0.9": token_mix(0.9),
    "RWKV-7 channel mix": channel_mix,
    "RWKV-7 key scale": key_scale,
    "1.02": constant(1.02),
    "-0.04": constant(-0.04),
}

# (class of the module that owns the parameter, or its name; parameter name) -> initialiser.
# Classes are matched with isinstance and earlier rows win.
TABLE: list[tuple[type | str, str, str]] = [
    ("MomentumDeltaNet", "A_log", "log U(0, 16)"),
    ("MomentumDeltaNet", "Mu_log", "log U(0, 16)"),
    ("MomentumDeltaNet", "dt_bias", "inverse softplus of dt"),
    ("MomentumDeltaNet", "mu_bias", "mu_init"),
    ("MomentumDeltaNet", "nu_bias", "zeros"),
    ("MomentumDeltaNet", "log_factor", "log_factor_init"),
    ("MomentumDeltaNet", "D_log", "log U(0, 1)"),
    ("GatedDeltaNet", "A_log", "log U(0, 16)"),
    ("GatedDeltaNet", "dt_bias", "inverse softplus of dt"),
    ("GatedDeltaProduct", "A_log", "log U(0, 16)"),
    ("GatedDeltaProduct", "dt_bias", "inverse softplus of dt"),
    ("Comba", "A_log", "log U(0, 16)"),
    ("Comba", "dt_bias", "inverse softplus of dt"),
    ("Comba", "decay", "ones"),
    ("Comba", "D", "correction factor"),
    ("KimiDeltaAttention", "A_log", "log U(1, 16)"),
    ("KimiDeltaAttention", "dt_bias", "inverse softplus of dt"),
    ("MomentumKDA", "A_log", "log U(1, 16)"),
    ("MomentumKDA", "dt_bias", "inverse softplus of dt"),
    ("MomentumKDA", "Mu_log", "log U(0, 16)"),
    ("MomentumKDA", "mu_bias", "inverse softplus of dt"),
    ("MomentumKDA", "nu_bias", "zeros"),
    ("MomentumKDA", "log_factor", "log_factor_init"),
    ("Mamba2", "A_log", "log U(1, 16)"),
    ("Mamba2", "dt_bias", "inverse softplus of dt"),
    ("Mamba2", "D", "ones"),
    ("ResidualLinear", "weight", "scaled by depth"),
    ("RWKV7Attention", "x_r", "RWKV-7 mix 0.2"),
    ("RWKV7Attention", "x_w", "RWKV-7 mix 0.9"),
    ("RWKV7Attention", "x_k", "RWKV-7 mix 0.7"),
    ("RWKV7Attention", "x_v", "RWKV-7 mix 0.7"),
    ("RWKV7Attention", "x_a", "RWKV-7 mix 0.9"),
    ("RWKV7Attention", "x_g", "RWKV-7 mix 0.2"),
    ("RWKV7Attention", "k_k", "RWKV-7 key scale"),
    ("RWKV7Attention", "k_a", "1.02"),
    ("RWKV7Attention", "r_k", "-0.04"),
    ("ChannelMixing", "x_k", "RWKV-7 channel mix"),
    ("OrthogonalLinear", "weight", "RWKV-7 orthogonal"),
    ("OrthogonalLinear", "bias", "RWKV-7 bias"),
    ("HeadGroupNorm", "weight", "RWKV-7 norm"),
    ("HeadGroupNorm", "bias", "zeros"),
    (ShortConvolution, "weight", "normal"),
    (ShortConvolution, "bias", "zeros"),
    (RMSNorm, "weight", "ones"),
    (nn.LayerNorm, "weight", "ones"),
    (nn.LayerNorm, "bias", "zeros"),
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
    raise ValueError(f"no initialiser for {type(module).__name__}.{parameter_name}: add a row to mdn.layers.init.TABLE")


@torch.no_grad()
def initialise(module: nn.Module, config: Any = None, keep: Callable[[Tensor], bool] = lambda parameter: False) -> None:
    """Writes fresh values into the parameters that ``module`` itself owns (not its children's).

    ``keep(parameter)`` True leaves it alone, as for parameters that a checkpoint already filled.
    """
    owned = dict(module.named_parameters(recurse=False))
    names = {name: initialiser_name(module, name) for name in owned}
    # what follows from other parameters comes after them
    for name in sorted(owned, key=lambda name: names[name] == "mu_init"):
        if not keep(owned[name]):
            owned[name].copy_(INITIALISERS[names[name]](owned[name], module, config))

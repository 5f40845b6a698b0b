"""RWKV-7's first values: curves over the channels, which bend with the depth of the layer.

An initialiser maps (parameter, module, config) to a new tensor, as in mdn.layers.initialisers. What depends on the
layer is kept in the modules as plain numbers (``gain``, ``first_weight``) or as a function of nothing (``bias_curve``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """An orthogonal matrix times the module's ``gain``, computed in float32; zeros for a gain of 0."""
    value = torch.zeros(parameter.shape, device=parameter.device)
    return nn.init.orthogonal_(value, gain=module.gain) if module.gain else value


def bias_curve(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return torch.zeros_like(parameter) if module.bias_curve is None else module.bias_curve()


def first_weight(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return torch.full_like(parameter, module.first_weight)


def token_mix(exponent: float) -> Callable[[Tensor, Any, Any], Tensor]:
    """1 - (channel / channels)^(exponent * share of the layers still to come)."""

    def initialiser(parameter: Tensor, module: Any, config: Any) -> Tensor:
        channels = parameter.numel()
        to_come = 1 - (module.layer_idx or 0) / module.num_hidden_layers
        return (1 - (torch.arange(channels) / channels) ** (exponent * to_come)).reshape(parameter.shape)

    return initialiser


def channel_mix(parameter: Tensor, module: Any, config: Any) -> Tensor:
    """1 - (channel / channels)^(share of the layers still to come, to the fourth)."""
    channels = parameter.numel()
    to_come = 1 - module.layer_idx / module.num_hidden_layers
    return 1 - (torch.arange(channels) / channels) ** (to_come**4)


def key_scale(parameter: Tensor, module: Any, config: Any) -> Tensor:
    return 0.71 - 0.1 * centred(parameter.numel())


def constant(value: float) -> Callable[[Tensor, Any, Any], Tensor]:
    def initialiser(parameter: Tensor, module: Any, config: Any) -> Tensor:
        return torch.full_like(parameter, value)

    return initialiser


def decay_bias(channels: int, head_dim: int, depth: float) -> Tensor:
    """Slow to fast over the channels, steeper in deeper layers (depth 0 to 1), with a zigzag inside every head."""
    ramp = -6 + 6 * (torch.arange(channels) / max(1, channels - 1)) ** (1 + depth**0.3)
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

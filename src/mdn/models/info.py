"""Facts about a model that follow from its configuration alone: parameters by part, state bytes, FLOPs per token.

The model is built on the meta device, so a 1.3B config costs no memory. Conventions: a multiply-add is two operations;
a token's forward pass through a linear layer is 2 operations per weight; training is three times the forward pass.
The embedding is a look-up and costs nothing. Rules are counted as their recurrence (the chunk form does more).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from mdn.common.loading import resolve_model
from mdn.layers import ChannelMixing, Mixer, RMSNorm
from mdn.models.configuration import MomentumDeltaNetConfig
from mdn.models.modeling import GatedMLP, MomentumDeltaNetForCausalLM
from mdn.models.sources import shipped_configs


@dataclass(frozen=True)
class ModelFacts:
    parameters: dict[str, int]
    """by part; they add up to ``total_parameters``"""
    total_parameters: int
    state_bytes: dict[str, int]
    """per sequence after ``context`` tokens, by kind"""
    state_bytes_per_token: int
    """how much the state grows with every token (attention without a window)"""
    forward_flops_per_token: int
    training_flops_per_token: int
    context: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_config(source: str) -> MomentumDeltaNetConfig:
    """A config by the name of a shipped one (``mdn_400M``), a JSON file, a model directory or a Hub id."""
    shipped = shipped_configs()
    if source in shipped or Path(source).is_file():
        return MomentumDeltaNetConfig.from_json_file(str(shipped.get(source, source)))
    try:
        source = resolve_model(source)
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"no config {source!r}: {error}; shipped ones are {', '.join(shipped)}") from None
    if not isinstance(config, MomentumDeltaNetConfig):
        raise ValueError(f"{source!r} is a {config.model_type} model, expected {MomentumDeltaNetConfig.model_type}")
    return config


def model_facts(config: MomentumDeltaNetConfig, context: int = 4096, element_bytes: int = 2) -> ModelFacts:
    """``context``: tokens seen so far, for attention; ``element_bytes``: of the model's dtype (2: bfloat16)."""
    with torch.device("meta"):
        model = MomentumDeltaNetForCausalLM(config)
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    state_bytes, growth = _state_bytes(mixers, context, element_bytes)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    forward = 2 * linear + sum(mixer.flops_per_token(context) for mixer in mixers)
    parameters = _parameters_by_part(model)
    return ModelFacts(
        parameters=parameters,
        total_parameters=sum(parameters.values()),
        state_bytes=state_bytes,
        state_bytes_per_token=growth,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        context=context,
    )


def _parameters_by_part(model: MomentumDeltaNetForCausalLM) -> dict[str, int]:
    parts: dict[str, int] = {"embedding": 0, "head": 0, "mixers": 0, "attention": 0, "MLPs": 0, "norms": 0}
    seen: set[int] = set()

    def count(part: str, module: nn.Module) -> None:
        for parameter in module.parameters():
            if id(parameter) not in seen:  # a tied head counts as embedding
                seen.add(id(parameter))
                parts[part] += parameter.numel()

    count("embedding", model.model.embeddings)
    count("head", model.lm_head)
    for module in model.modules():
        if isinstance(module, Mixer):
            count("attention" if module.cache_type == "full_attention" else "mixers", module)
        elif isinstance(module, GatedMLP | ChannelMixing):
            count("MLPs", module)
    for module in model.modules():
        if isinstance(module, RMSNorm | nn.LayerNorm):
            count("norms", module)
    return {part: number for part, number in parts.items() if number}


def _state_bytes(mixers: list[Mixer], context: int, element_bytes: int) -> tuple[dict[str, int], int]:
    total: dict[str, int] = {}
    growth = 0
    for mixer in mixers:
        window = getattr(mixer, "window_size", None)
        for kind, (shape, dtype) in mixer.state_shapes().items():
            size = math.prod(shape) * (element_bytes if dtype is None else dtype.itemsize)
            if mixer.cache_type == "full_attention":
                kind = "keys and values"
                growth += 0 if window is not None else size
                size *= context if window is None else min(context, window - 1)
            total[kind] = total.get(kind, 0) + size
    return total, growth

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
from tqdm import tqdm
from transformers import AutoConfig

from mdn.common.files import read_json
from mdn.common.loading import import_plugins_of_environment, resolve_model
from mdn.layers import ChannelMixing, Mixer, RMSNorm
from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.modeling import GatedMLP, MomentumDeltaNetForCausalLM

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


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


def shipped_configs() -> dict[str, Path]:
    """The JSON configs inside the package, by name."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.json"))}


def load_config(source: str) -> MomentumDeltaNetConfig:
    """A config by the name of a shipped one (``mdn_400M``), a JSON file, a model directory or a Hub id."""
    import_plugins_of_environment()
    shipped = shipped_configs()
    if source in shipped or Path(source).is_file():
        path = shipped.get(source, Path(source))
        read_json(path)  # names the file if it holds no JSON object
        return MomentumDeltaNetConfig.from_json_file(str(path))
    try:
        source = resolve_model(source)
        if Path(source).is_dir():
            read_json(Path(source) / "config.json")
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"no config {source!r}: {error}; shipped ones are {', '.join(shipped)}") from None
    if not isinstance(config, MomentumDeltaNetConfig):
        raise ValueError(f"{source!r} is a {config.model_type} model, expected {MomentumDeltaNetConfig.model_type}")
    return config


def model_facts(config: MomentumDeltaNetConfig, context: int = 4096, element_bytes: int = 2) -> ModelFacts:
    """``context``: tokens seen so far, for attention; ``element_bytes``: of the model's dtype (2: bfloat16)."""
    with torch.device("meta"):
        model = MomentumDeltaNetForCausalLM(unpacked(config))
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


def unpacked(config: MomentumDeltaNetConfig) -> MomentumDeltaNetConfig:
    """The same model with ordinary parameters."""
    return MomentumDeltaNetConfig.from_dict(config.to_dict() | {"weight_format": None})


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


# --------------------------------------------------------------------- the table of all shipped configurations


CONTEXT = 4096
INTRODUCTION = f"""# Models

Made by `mdn info --all > docs/models.md`. Every row is a JSON file in `configs/`, which `mdn info` and recipes take by
its name. Sizes follow the paper and the authors' released configs. Where neither says how a model was built, the choice
is ours and named below the table.

- Parameters: all of them, and without embedding and head.
- State: what one sequence keeps after {CONTEXT:,} tokens, in a bfloat16 model (recurrent states are float32).
- GFLOPs: of the forward pass of one token at that context; a multiply-add is two. Training costs three times as much.
"""
NOTES = """
Mamba2-H: the paper does not give its layout. Here it keeps the 48 blocks without MLP of Mamba2, with attention in every
fourth of them. The other hybrids put attention at layers 3, 7, 11, ... (3:1) or 7, 15, 23 (7:1) of 24, as the authors'
configs do.
"""
COLUMNS = ("config", "layers", "hidden", "heads", "parameters", "without embeddings", "state", "GFLOPs")


def all_facts(progress: bool = False) -> dict[str, ModelFacts]:
    """Facts about every shipped config, by name."""
    names = tqdm(shipped_configs(), unit="config", disable=not progress, leave=False)
    return {name: model_facts(load_config(name), CONTEXT) for name in names}


def page(facts: dict[str, ModelFacts]) -> str:
    """The whole of docs/models.md."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(name, of_one) for name, of_one in facts.items())]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{INTRODUCTION}\n{table}\n{NOTES}"


def _row(name: str, facts: ModelFacts) -> tuple[str, ...]:
    config = load_config(name)
    outside = sum(facts.parameters.get(part, 0) for part in ("embedding", "head"))
    return (
        f"`{name}`",
        _layers(config),
        str(config.hidden_size),
        _heads(config),
        f"{facts.total_parameters:,}",
        f"{facts.total_parameters - outside:,}",
        f"{sum(facts.state_bytes.values()) / 2**20:.1f} MiB",
        f"{facts.forward_flops_per_token / 1e9:.3f}",
    )


def _layers(config: MomentumDeltaNetConfig) -> str:
    kinds = [config.mixer_name(layer) for layer in range(config.num_hidden_layers)]
    return " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _heads(config: MomentumDeltaNetConfig) -> str:
    """Heads and their key dimension; Mamba2's follow from its width."""
    if config.mixer == "mamba2":
        expand = (config.mixer_options or {}).get("expand", 2)
        return f"{int(expand * config.hidden_size) // config.head_dim} x {config.head_dim}"
    dim = config.hidden_size // config.num_heads if config.mixer == "attention" else config.head_dim
    return f"{config.num_heads} x {dim}"

"""The model of a recipe: a named or inline config, with the tokenizer's vocabulary, built from the recipe's seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from mdn.common.errors import nearest
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.recipe import Recipe

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# Entries of a JSON config that say what it is, not what the model looks like.
_NOT_FIELDS = {"model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "auto_map"}


def _named_config(name: str) -> dict[str, Any]:
    for path in (CONFIGS / f"{name}.json", Path(name), Path(name) / "config.json"):
        if path.is_file():
            try:
                content = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(f"model.config {name!r}: {path} is not valid JSON: {error}") from None
            return {key: value for key, value in content.items() if key not in _NOT_FIELDS}
    known = sorted(path.stem for path in CONFIGS.glob("*.json"))
    raise ValueError(
        f"model.config {name!r} is neither a file nor one of {', '.join(known) or '(none)'}{nearest(name, known)}"
    )


def model_config(recipe: Recipe, vocab_size: int, end_id: int) -> MomentumDeltaNetConfig:
    """The config the recipe describes; unknown fields are errors that name the nearest known one."""
    fields = dict(recipe.model)
    base = _named_config(str(fields.pop("config"))) if "config" in fields else {}
    known = {field.name for field in dataclasses.fields(MomentumDeltaNetConfig)}
    for name in fields:
        if name not in known:
            raise ValueError(f"recipe {recipe.name}: unknown key 'model.{name}'{nearest(name, known)}")
    if fields.get("vocab_size", vocab_size) < vocab_size:
        raise ValueError(
            f"model.vocab_size={fields['vocab_size']} is smaller than the tokenizer's vocabulary of {vocab_size}"
        )
    defaults = {
        "vocab_size": vocab_size,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "max_position_embeddings": recipe.training.sequence_length,
    }
    try:
        return MomentumDeltaNetConfig(**{**base, **defaults, **fields})
    except TypeError as error:
        raise ValueError(f"recipe {recipe.name}: model: {error}") from None


def build_model(recipe: Recipe, config: MomentumDeltaNetConfig) -> MomentumDeltaNetForCausalLM:
    """Fresh weights in float32; the same recipe and seed give the same weights."""
    set_seed(recipe.seed)
    return MomentumDeltaNetForCausalLM(config)


def count_parameters(config: MomentumDeltaNetConfig) -> int:
    """Parameters of the model without allocating them; a tied head counts once."""
    with torch.device("meta"):
        model = MomentumDeltaNetForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def identity_of(recipe: Recipe, config: MomentumDeltaNetConfig, data: str) -> dict[str, Any]:
    """The fields that decide what is learnt, flat. A checkpoint with other values belongs to another run.

    How the work is spread (micro-batch, ranks, sharding, recomputation) is not among them: it may change at a resume.
    """
    spread = {"micro_batch_tokens", "gradient_checkpointing", "compile", "loader_workers", "steps", "tokens"}
    kept = {name: value for name, value in recipe.training.model_dump(mode="json").items() if name not in spread}
    kept["steps"] = recipe.training.total_steps
    flat = {
        f"training.{name}": value for name, value in kept.items() if name not in ("non_finite", "max_skipped_steps")
    }
    not_model = {"transformers_version", "dtype", "torch_dtype", "architectures", "backend"}
    model = {name: value for name, value in config.to_dict().items() if name not in not_model}
    flat |= {f"model.{name}": value for name, value in model.items()}
    return flat | {"seed": recipe.seed, "data": data, "data.reset_at_documents": recipe.data.reset_at_documents}

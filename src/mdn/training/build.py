"""The model of a recipe: a named or inline config with the tokenizer's vocabulary, and its initial weights.

Weights come from the recipe's seed, or from the model that `model.init_from` names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from mdn.common.errors import nearest, one_line
from mdn.common.files import read_json, sha256_of
from mdn.common.hardware import physical_memory
from mdn.common.loading import (
    import_plugins,
    import_plugins_of_environment,
    load_model,
    load_tokenizer,
    resolve_model,
)
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.models.config import of_this_version
from mdn.models.info import shipped_configs
from mdn.parallel.tensor import check_plan
from mdn.training.recipe import Recipe

# Entries of a JSON config that say what it is, not what the model looks like.
_NOT_FIELDS = {"model_type", "architectures", "transformers_version", "mdn_version", "torch_dtype", "dtype", "auto_map"}


def _fields_in(path: Path) -> dict[str, Any]:
    return {key: value for key, value in of_this_version(read_json(path)).items() if key not in _NOT_FIELDS}


def _named_config(name: str) -> dict[str, Any]:
    """The fields of the config that `model.config` names."""
    shipped = shipped_configs()
    for path in (shipped.get(name), Path(name), Path(name) / "config.json"):
        if path is not None and path.is_file():
            return _fields_in(path)
    raise ValueError(f"model.config {name!r} is neither a file nor one of {', '.join(shipped)}{nearest(name, shipped)}")


def _initial_config(source: str) -> dict[str, Any]:
    """The fields of the config of the model that `model.init_from` names."""
    place = Path(resolve_model(source))
    if not place.is_dir():
        raise ValueError(
            f"model.init_from {source!r} is not a directory here: download it first, for example with "
            f"`hf download {source} --local-dir DIR`"
        )
    fields = _fields_in(place / "config.json")
    if fields.get("weight_format") is not None:
        raise ValueError(
            f"model.init_from {source!r} has {fields['weight_format']} weights: packed weights cannot be trained; give "
            "the model that they were packed from"
        )
    return fields


def model_config(recipe: Recipe, vocab_size: int, end_id: int) -> MomentumDeltaNetConfig:
    """The config the recipe describes; unknown fields are errors that name the nearest known one."""
    import_plugins_of_environment()
    import_plugins(recipe.plugins)
    fields = dict(recipe.model)
    config, init_from = fields.pop("config", None), fields.pop("init_from", None)
    if config is not None and init_from is not None:
        raise ValueError("model.config and model.init_from are both given, but a model has one config: leave one out")
    known = {field.name for field in dataclasses.fields(MomentumDeltaNetConfig)}
    for name in fields:
        if name not in known:
            close = nearest(str(name), known | {"config", "init_from"})
            raise ValueError(f"recipe {recipe.name}: unknown key 'model.{name}'{close}")
    base: dict[str, Any] = {}
    if init_from is not None:
        base = _initial_config(str(init_from))
        fields.setdefault("vocab_size", base.get("vocab_size", vocab_size))
    elif config is not None:
        base = _named_config(str(config))
    defaults = {
        "vocab_size": vocab_size,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": None,  # texts are packed, and the embedding of such a token is not trained
        "max_position_embeddings": recipe.training.sequence_length,
    }
    try:
        built = MomentumDeltaNetConfig(**{**base, **defaults, **fields})
        too_small = built.vocab_size < vocab_size
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"recipe {recipe.name}: model: {one_line(error)}") from None
    if built.weight_format is not None:
        raise ValueError(
            f"model.weight_format={built.weight_format!r}: packed weights cannot be trained; leave it out, and pack "
            "the trained model with `mdn quantize`"
        )
    if too_small:
        raise ValueError(
            f"model.vocab_size={built.vocab_size} is smaller than the tokenizer's vocabulary of {vocab_size}"
        )
    return built


def meta_model(config: MomentumDeltaNetConfig) -> MomentumDeltaNetForCausalLM:
    """The model without memory; a config that describes no model is a ValueError."""
    try:
        with torch.device("meta"):
            return MomentumDeltaNetForCausalLM(config)
    except (RuntimeError, TypeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"no model can be built from this config: {one_line(error)}") from None


def count_parameters(config: MomentumDeltaNetConfig) -> int:
    """Parameters of the model without allocating them; a tied head counts once."""
    return meta_model(config).num_parameters()


def build_model(recipe: Recipe, config: MomentumDeltaNetConfig) -> MomentumDeltaNetForCausalLM:
    """The model before its first step, in float32: the same recipe and seed give the same weights."""
    source = recipe.model.get("init_from")
    if source is not None:
        return _initialised_from(str(source), config)
    set_seed(recipe.seed)
    return MomentumDeltaNetForCausalLM(config)


def refuse_too_large(recipe: Recipe, config: MomentumDeltaNetConfig) -> None:
    """A ValueError for a config that describes no model, or one that this machine cannot hold."""
    size, memory = 4 * count_parameters(config), physical_memory()
    if memory is not None and size > memory:
        raise ValueError(
            f"recipe {recipe.name}: the model's weights need {size / 1e9:,.1f} GB in float32, but this machine has "
            f"{memory / 1e9:,.1f} GB of memory"
        )


def refuse_indivisible(recipe: Recipe, config: MomentumDeltaNetConfig) -> None:
    """A ValueError if `distributed.tensor_parallel` ranks cannot share the heads; it names the sizes that can."""
    ranks = recipe.distributed.tensor_parallel
    if ranks == 1:
        return
    model = meta_model(config)
    check_plan(model)
    try:
        for layer in model.model.layers:
            layer.attn.keep_part(ranks)
    except ValueError as error:
        raise ValueError(f"distributed.tensor_parallel={ranks}: {error}") from None


def _initialised_from(source: str, config: MomentumDeltaNetConfig) -> MomentumDeltaNetForCausalLM:
    """The weights of another model in the recipe's config; every tensor must fit."""
    weights = load_model(source, dtype="float32").state_dict()
    model = MomentumDeltaNetForCausalLM(config)
    expected = model.state_dict()
    wrong = [name for name in {**weights, **expected} if _shape(weights, name) != _shape(expected, name)]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"model.init_from {source!r} does not fit the recipe's model in {len(wrong)} tensors, first {first}: "
            f"{_shape(weights, first)} there, {_shape(expected, first)} here; leave out the other model fields"
        )
    model.load_state_dict(weights)
    return model


def _shape(tensors: dict[str, torch.Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "missing"


def check_initial_tokenizer(recipe: Recipe, tokenizer: Any) -> None:
    """Refuse to train a model with other ids than those it was trained with."""
    source = recipe.model.get("init_from")
    if source is None or not (Path(resolve_model(str(source))) / "tokenizer_config.json").is_file():
        return
    theirs, ours = load_tokenizer(str(source)).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sum(theirs.get(token) != number for token, number in ours.items())
        raise ValueError(
            f"model.init_from {source!r} was trained with another tokenizer: {different:,} of {len(ours):,} tokens "
            "have other ids there; leave out the tokenizer block to use the model's own"
        )


def identity_of(recipe: Recipe, config: MomentumDeltaNetConfig, data: str) -> dict[str, Any]:
    """The fields that decide what is learnt, flat. A checkpoint with other values belongs to another run.

    How the work is spread (micro-batch, ranks, sharding, threads, recomputation) is not among them: it may change at a
    resume.
    """
    spread = {"micro_batch_tokens", "gradient_checkpointing", "compile", "loader_workers", "threads"}
    not_decisive = {*spread, "steps", "tokens", "non_finite", "max_skipped_steps"}
    training = recipe.training.model_dump(mode="json") | {"total_steps": recipe.training.total_steps}
    flat = {f"training.{name}": value for name, value in training.items() if name not in not_decisive}
    flat["training.steps"] = flat.pop("training.total_steps")
    not_model = {"transformers_version", "mdn_version", "dtype", "torch_dtype", "architectures"}
    not_model |= {"backend", "weight_format"}
    model = {name: value for name, value in config.to_dict().items() if name not in not_model}
    flat |= {f"model.{name}": value for name, value in model.items()}
    if recipe.model.get("init_from") is not None:
        place = Path(resolve_model(str(recipe.model["init_from"])))
        flat["model.init_from"] = [sha256_of(file) for file in sorted(place.glob("*.safetensors"))]
    return flat | {"seed": recipe.seed, "data": data, "data.reset_at_documents": recipe.data.reset_at_documents}

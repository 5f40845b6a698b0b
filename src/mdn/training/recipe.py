"""Recipes: which keys exist (one typed class per block), and how one is found, overridden and checked.

    recipe = load_recipe("demo", ["training.steps=20", "model.mixer=gated_deltanet"])

A recipe is a YAML file with the blocks `model`, `data`, `tokenizer`, `training`, `logging`, `distributed` and `sample`.
A wrong key is an error that names the nearest right one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mdn.common.errors import nearest, nearest_key
from mdn.common.files import parse_yaml, read_yaml
from mdn.common.loading import resolve_model
from mdn.common.results import markdown_table

SOURCES = ("stdlib", "files", "hub")


class Block(BaseModel):
    """A block of a recipe: unknown keys are errors, and a recipe does not change after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class DataSettings(Block):
    """Where the text comes from and how it is cut."""

    source: str = Field(
        "stdlib", description="stdlib (Python's own sources), files, hub, or the name of a plugin's corpus"
    )
    options: dict[str, Any] = Field({}, description="settings of a plugin's corpus, passed to it unchanged")
    paths: tuple[str, ...] = Field((), description="files or folders (.txt, .jsonl, .parquet) when source is files")
    dataset: str | None = Field(None, description="owner/name on the Hub when source is hub")
    subset: str | None = Field(None, description="configuration name of the Hub dataset")
    split: str = Field("train", description="split of the Hub dataset")
    revision: str | None = Field(None, description="commit or tag of the Hub dataset; part of the cache key")
    streaming: bool = Field(True, description="read the Hub dataset as a stream instead of downloading it first")
    text_field: str = Field("text", description="name of the text column of .jsonl, .parquet and Hub data")
    max_bytes: int | None = Field(
        None, gt=0, description="stop reading after this many bytes of text; null reads everything"
    )
    held_out: float = Field(0.05, gt=0, lt=1, description="share of the documents kept out of training")
    held_out_bytes: int | None = Field(1_000_000, gt=0, description="evaluate on at most this much held-out text")
    reset_at_documents: bool = Field(True, description="the state does not cross from one document to the next")
    workers: int | None = Field(
        None, ge=1, le=1024, description="processes that tokenise; null takes one per core, at most 16"
    )
    cache_dir: str | None = Field(None, description="where token caches live; null: $MDN_CACHE or ~/.cache/mdn")

    @model_validator(mode="after")
    def _source_is_complete(self) -> DataSettings:
        if self.source == "files" and not self.paths:
            raise ValueError("data.paths is empty, but data.source is files: give at least one file or folder")
        if self.source == "hub" and not self.dataset:
            raise ValueError("data.dataset is missing, but data.source is hub: give owner/name")
        if self.source in ("stdlib", "hub") and self.paths:
            raise ValueError(
                f"data.paths is given, but data.source is {self.source}: set data.source=files to read them"
            )
        return self


class TokenizerSettings(Block):
    """How text becomes token ids."""

    kind: Literal["bytes", "bpe", "gpt2", "pretrained"] = Field("bytes", description="bpe is trained on the corpus")
    vocab_size: int = Field(4096, ge=257, le=2**31, description="size of the vocabulary when kind is bpe")
    train_bytes: int = Field(10_000_000, gt=0, description="bytes of training text the bpe is learnt from")
    path: str | None = Field(None, description="directory or Hub name when kind is pretrained")

    @model_validator(mode="after")
    def _path_belongs_to_pretrained(self) -> TokenizerSettings:
        if (self.kind == "pretrained") != (self.path is not None):
            raise ValueError("tokenizer.path is needed when tokenizer.kind is pretrained, and only then")
        return self


class TrainingSettings(Block):
    """Optimiser, schedule and batch. The batch is counted in tokens, so it does not depend on the number of devices."""

    batch_tokens: int = Field(524_288, gt=0, le=2**40, description="tokens of one optimiser step over all devices")
    sequence_length: int = Field(4096, ge=2, le=2**31, description="tokens of one row of the batch")
    micro_batch_tokens: int | None = Field(
        None, gt=0, le=2**40, description="tokens of one pass on one device; null: one sequence"
    )
    steps: int | None = Field(None, gt=0, le=10**9, description="optimiser steps; give steps or tokens")
    tokens: int | None = Field(None, gt=0, le=2**60, description="tokens to train on, rounded down to whole steps")
    learning_rate: float = Field(3e-4, gt=0, description="peak learning rate")
    warmup_steps: int = Field(1024, ge=0, le=10**9, description="steps with a rising learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="what follows the warm-up")
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1, description="where cosine ends, as a share of the peak")
    betas: tuple[float, float] = Field((0.9, 0.95), description="of AdamW")
    epsilon: float = Field(1e-15, gt=0, description="of AdamW")
    weight_decay: float = Field(0.1, ge=0, description="of AdamW, for matrices")
    decay_gates: bool = Field(False, description="decay all other parameters too: of gates, biases, norms")
    clip_norm: float = Field(1.0, ge=0, description="gradients are scaled down to this norm; 0 leaves them")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16: autocast, float32 weights")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads; null: all cores, fewer while other programs use them"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    compile: bool = Field(False, description="torch.compile the model")
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="what to do with a NaN or infinite loss or gradient"
    )
    max_skipped_steps: int = Field(20, ge=1, description="with non_finite: skip, stop after this many in a row")
    loader_workers: int = Field(0, ge=0, le=1024, description="processes that prefetch batches")

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainingSettings:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(
                f"give training.steps or training.tokens, not both; got steps={self.steps}, tokens={self.tokens}"
            )
        if self.batch_tokens % self.sequence_length:
            raise ValueError(
                f"training.batch_tokens must be a multiple of training.sequence_length; {self.batch_tokens} is not a "
                f"multiple of {self.sequence_length}"
            )
        if self.micro_batch_tokens is not None and self.micro_batch_tokens % self.sequence_length:
            raise ValueError(
                f"training.micro_batch_tokens must be a multiple of training.sequence_length; "
                f"{self.micro_batch_tokens} is not a multiple of {self.sequence_length}"
            )
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas must be at least 0 and below 1; got {list(self.betas)}")
        if self.total_steps < 1:
            raise ValueError(
                f"training.tokens must be at least training.batch_tokens={self.batch_tokens}; got {self.tokens}"
            )
        return self

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else (self.tokens or 0) // self.batch_tokens

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.sequence_length

    @property
    def micro_batch_sequences(self) -> int:
        return (self.micro_batch_tokens or self.sequence_length) // self.sequence_length


class LoggingSettings(Block):
    """What is written while training runs, in steps. 0 switches the thing off."""

    log_every: int = Field(10, ge=1, description="steps between the points of TensorBoard's training curves")
    gates_every: int = Field(100, ge=0, description="steps between gate statistics and state norms")
    evaluate_every: int = Field(
        0, ge=0, description="steps between held-out evaluations; there is one at the end anyway"
    )
    save_every: int = Field(500, ge=0, description="steps between checkpoints; there is one at the end anyway")
    keep_checkpoints: int = Field(2, ge=1, description="complete checkpoints kept on disk")
    tensorboard: bool = Field(True, description="write RUN/tensorboard")


class DistributedSettings(Block):
    """How the model is spread over the processes that torchrun started."""

    strategy: Literal["ddp", "fsdp", "hsdp"] = Field("ddp", description="fsdp and hsdp shard parameters (FSDP2)")
    shard_size: int | None = Field(None, ge=1, description="ranks that share one copy of the model, for hsdp")
    context_parallel: int = Field(1, ge=1, le=2**16, description="ranks that share the tokens of a row")
    context_layout: Literal["contiguous", "zigzag"] = Field(
        "contiguous", description="zigzag balances the work of attention layers"
    )
    tensor_parallel: int = Field(1, ge=1, le=2**16, description="ranks that share the heads of a layer")

    @model_validator(mode="after")
    def _hsdp_has_a_shard_size(self) -> DistributedSettings:
        if (self.strategy == "hsdp") != (self.shard_size is not None):
            raise ValueError("distributed.shard_size is needed when distributed.strategy is hsdp, and only then")
        return self


class SampleSettings(Block):
    """The text completed at the end of training. An empty prompt switches it off."""

    prompt: str = Field("", description="the text to complete")
    max_new_tokens: int = Field(120, ge=1, le=10**6, description="tokens to add")
    temperature: float = Field(0.0, ge=0, le=1e6, description="0 takes the likeliest token every time")


class Recipe(Block):
    """A training run."""

    name: str = Field(min_length=1, description="names the run and its directory")
    description: str = Field("", description="one line for the model card")
    output: str | None = Field(None, description="directory of the run; null: runs/<name>")
    seed: int = Field(42, ge=0, le=2**32 - 1, description="of the weights and the order of the data")
    plugins: tuple[str, ...] = Field(
        (), description="modules to import first: names, or .py files beside the recipe (own mixers, own data)"
    )
    model: dict[str, Any] = Field(
        description="`config` or `init_from`, and fields of the model's config (see the section on models)"
    )
    data: DataSettings = DataSettings()  # type: ignore[call-arg]
    tokenizer: TokenizerSettings = TokenizerSettings()  # type: ignore[call-arg]
    training: TrainingSettings
    logging: LoggingSettings = LoggingSettings()  # type: ignore[call-arg]
    distributed: DistributedSettings = DistributedSettings()  # type: ignore[call-arg]
    sample: SampleSettings = SampleSettings()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _parallelism_can_be_combined(self) -> Recipe:
        settings = self.distributed
        split = {"context_parallel": settings.context_parallel, "tensor_parallel": settings.tensor_parallel}
        for name, ranks in split.items():
            if ranks > 1 and self.training.compile:
                raise ValueError(f"training.compile cannot be combined with distributed.{name}={ranks}")
        if self.training.sequence_length < 2 * settings.context_parallel:
            raise ValueError(
                f"training.sequence_length must be at least 2 x distributed.context_parallel="
                f"{settings.context_parallel}, got {self.training.sequence_length}"
            )
        if settings.tensor_parallel > 1 and settings.strategy != "ddp":
            raise ValueError(
                f"distributed.tensor_parallel={settings.tensor_parallel} needs distributed.strategy=ddp, got "
                f"{settings.strategy}"
            )
        return self

    @model_validator(mode="after")
    def _source_is_known(self) -> Recipe:
        if self.data.source not in SOURCES and not self.plugins:
            raise ValueError(
                f"data.source must be one of {', '.join(SOURCES)} (or a corpus that a module of `plugins` adds), got "
                f"{self.data.source!r}"
            )
        return self

    @property
    def output_dir(self) -> Path:
        return Path(self.output) if self.output else Path("runs") / self.name


PACKAGED = Path(__file__).resolve().parent.parent / "recipes"
Schema = TypeVar("Schema", bound=BaseModel)

# Overrides below these keys do not change what is learnt, so they do not change the name of the run either.
_KEYS_THAT_KEEP_THE_NAME = (
    "output",
    "name",
    "description",
    "logging.",
    "distributed.",
    "sample.",
    "data.cache_dir",
    "data.workers",
    "training.threads",
)


def packaged_recipes() -> list[str]:
    """Names of the recipes in the package, as `mdn train NAME` takes them."""
    names = (path.relative_to(PACKAGED).with_suffix("").as_posix() for path in PACKAGED.rglob("*.yaml"))
    # mqar/ belongs to `mdn mqar`; a leading underscore marks what other recipes extend
    return sorted(name for name in names if not name.startswith("mqar/") and not Path(name).name.startswith("_"))


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path, a run folder (its recipe.yaml), or the name of a packaged one.

    A packaged name may be written with or without `recipes/` and `.yaml`.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    short = re.sub(r"^(\./)?recipes/", "", path.as_posix())
    short = re.sub(r"\.ya?ml$", "", short)
    packaged = PACKAGED / f"{short}.yaml"
    if packaged.is_file():
        return packaged
    known = packaged_recipes()
    raise ValueError(
        f"no recipe {str(name)!r}: neither a file, a run folder nor a packaged recipe{nearest(short, known)}; "
        f"packaged: {', '.join(known)}"
    )


def read_recipe(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's content over that of the recipe it `extends` (a name, or a path from the file's own folder)."""
    if path in seen:
        raise ValueError(f"recipe {path} extends itself: {' -> '.join(str(p) for p in (*seen, path))}")
    content = read_yaml(path)
    if isinstance(content.get("plugins"), list):
        content["plugins"] = [_plugin_beside(str(plugin), path.parent) for plugin in content["plugins"]]
    if "extends" not in content:
        return content
    name = str(content.pop("extends"))
    beside = path.parent / name
    return merge(read_recipe(beside if beside.is_file() else find_recipe(name), (*seen, path)), content)


def _plugin_beside(plugin: str, folder: Path) -> str:
    """A .py file beside the recipe as an absolute path, so that the run's own recipe.yaml finds it."""
    beside = folder / plugin
    return str(beside.resolve()) if plugin.endswith(".py") and beside.is_file() else plugin


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: blocks entry by entry, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one dotted key of the nested mapping in place; the value is read as YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"override {override!r} is not of the form key=value, for example training.steps=100")
    parts = key.strip().split(".")
    place = content
    for depth, part in enumerate(parts[:-1]):
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ValueError(f"override {override!r}: {'.'.join(parts[: depth + 1])} is a value, not a block")
    place[parts[-1]] = parse_yaml(text, f"override {key.strip()}={text[:60]!r}")


# ---- recipes


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe. A run with overrides gets its own directory, unless `output` is given.

    The name of a run folder means that run, whatever is overridden.
    """
    path = find_recipe(name)
    content = read_recipe(path)
    if path == Path(name) / "recipe.yaml":  # a folder of the same name as a packaged recipe is no run
        content["output"] = str(name)
    _refuse_undone(overrides)
    for override in overrides:
        apply_override(content, override)
    _replace_length(content, overrides)
    _take_tokenizer_of_initial_model(content)
    recipe = validate(content, str(path))
    if overrides and recipe.output is None:
        recipe = recipe.model_copy(update={"output": str(Path("runs") / (recipe.name + _suffix(overrides)))})
    return recipe


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _refuse_undone(overrides: Sequence[str]) -> None:
    """An override of a whole block would silently undo an earlier one of a key in it."""
    for number, later in enumerate(overrides):
        for earlier in overrides[:number]:
            if _key(earlier).startswith(f"{_key(later)}."):
                raise ValueError(
                    f"override {later!r} replaces the whole block and with it {earlier!r}: give the block first"
                )


def _replace_length(content: dict[str, Any], overrides: Sequence[str]) -> None:
    """A recipe has steps or tokens: an override of one replaces the other, unless both are overridden."""
    keys, training = set(map(_key, overrides)), content.get("training")
    for given, other in (("steps", "tokens"), ("tokens", "steps")):
        alone = f"training.{given}" in keys and f"training.{other}" not in keys
        if alone and isinstance(training, dict) and training[given] is not None:
            training[other] = None


def _take_tokenizer_of_initial_model(content: dict[str, Any]) -> None:
    """A recipe that starts from a model and names no tokenizer uses the one that the model was trained with."""
    model = content.get("model")
    if not isinstance(model, dict) or model.get("init_from") is None or "tokenizer" in content:
        return
    place = resolve_model(str(model["init_from"]))
    if (Path(place) / "tokenizer_config.json").is_file():
        content["tokenizer"] = {"kind": "pretrained", "path": place}


def _suffix(overrides: Sequence[str]) -> str:
    """'-mixer=gated_deltanet' and the like: what was overridden, safe as part of a file name."""
    decisive = (override for override in overrides if not override.startswith(_KEYS_THAT_KEEP_THE_NAME))
    pairs = (override.partition("=") for override in decisive)
    short = (f"{key.strip().rsplit('.', 1)[-1]}={value.strip()}" for key, _, value in pairs)
    return "".join("-" + re.sub(r"[^\w.=,+-]+", "_", part) for part in short)[:120]


def validate(content: dict[str, Any], where: str) -> Recipe:
    return validate_as(Recipe, content, where)


def validate_as(schema: type[Schema], content: dict[str, Any], where: str) -> Schema:
    """`content` as an instance of `schema`; a ValueError that names file, key, what was given and what is expected."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        lines = [_explain(detail, schema) for detail in error.errors()]
        raise ValueError(f"recipe {where}: " + "; ".join(lines)) from None


def _explain(detail: Any, schema: type[BaseModel]) -> str:
    """One pydantic error as a phrase with the dotted key, what was given and what is expected."""
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = [field.key for field in fields_of(schema)]
        blocks = {known_key.split(".")[0] for known_key in known}
        return f"unknown key {key!r}{nearest_key(key, [*sorted(blocks), *known])}"
    if detail["type"] == "missing":
        return f"key {key!r} is missing"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    given = repr(detail["input"])
    return (
        f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {given if len(given) < 80 else given[:77] + '...'}"
    )


@dataclass(frozen=True)
class FieldOfRecipe:
    key: str
    default: str
    meaning: str


def fields_of(schema: type[BaseModel], prefix: str = "") -> list[FieldOfRecipe]:
    """Every dotted key of a schema (those of the model block belong to the model's config)."""
    fields: list[FieldOfRecipe] = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            fields += fields_of(kind, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else json.dumps(field.default)
        choices = ", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
        meaning = "; ".join(filter(None, (field.description, choices and f"one of {choices}")))
        fields.append(FieldOfRecipe(prefix + name, default, meaning))
    return fields


def field_table() -> str:
    """The Markdown table of docs/training.md (`mdn train --fields`)."""
    return markdown_table(
        ("key", "default", "meaning"),
        [(f"`{field.key}`", f"`{field.default}`", field.meaning) for field in fields_of(Recipe)],
    )


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; reading it back gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)

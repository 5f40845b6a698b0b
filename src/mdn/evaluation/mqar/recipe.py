"""What a recipe of `mdn mqar` may say: the task, the segments, the models and the grid, each field with its meaning.

A cell of the grid is one training run: (mixer, hidden size, learning rate, seed).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from mdn.common.errors import nearest
from mdn.evaluation.mqar.data import check_segment
from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetConfig
from mdn.training.recipe import PACKAGED, Block, apply_override, read_yaml


class Segment(Block):
    """Examples of one shape."""

    length: int = Field(description="tokens of an example, even")
    pairs: int = Field(description="key-value pairs")
    examples: int = Field(1000, gt=0, description="how many; for training without epochs, the share of the steps")

    @property
    def name(self) -> str:
        return f"{self.length}:{self.pairs}"


class Task(Block):
    """The rules of the examples."""

    vocab_size: int = Field(8192, description="half of it keys (token 0 is none), half values")
    power: float = Field(0.01, gt=0, description="a of the slots' weights slot^(a - 1)")
    rewriting: bool = Field(False, description="bind every key twice and ask for the later value")


class Training(Block):
    """How a cell is trained. Data: a fixed set for `epochs`, or fresh examples for `steps`."""

    epochs: int | None = Field(None, gt=0, description="passes over the examples of the train segments")
    steps: int | None = Field(None, gt=0, description="optimiser steps, each on fresh examples of one segment")
    batch_size: int | None = Field(None, gt=0, description="examples of a step")
    batch_tokens: int | None = Field(None, gt=0, description="tokens of a step, instead of batch_size")
    betas: tuple[float, float] = Field((0.9, 0.98), description="of AdamW")
    weight_decay: float = Field(0.1, ge=0, description="for matrices; gates' scales, biases and norms have none")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps with a rising learning rate, then a cosine")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")

    @model_validator(mode="after")
    def _one_of_each(self) -> Training:
        for names in (("epochs", "steps"), ("batch_size", "batch_tokens")):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise ValueError(f"training: give exactly one of {names[0]} and {names[1]}")
        return self


class Cell(Block):
    """One training run of the grid."""

    mixer: str
    hidden_size: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.mixer}-d{self.hidden_size}-lr{self.learning_rate:g}-seed{self.seed}"


class MqarRecipe(Block):
    """A whole grid."""

    name: str
    description: str = ""
    task: Task = Field(default_factory=lambda: Task.model_validate({}))
    train: tuple[Segment, ...] = Field(min_length=1)
    test: tuple[Segment, ...] = Field(min_length=1)
    model: dict[str, Any] = Field({}, description="fields of the model's config, for every mixer")
    mixers: dict[str, dict[str, Any]] = Field(min_length=1, description="mixer: the fields that differ for it")
    hidden_sizes: tuple[int, ...] = Field(min_length=1)
    learning_rates: tuple[float, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    training: Training

    @model_validator(mode="after")
    def _is_possible(self) -> MqarRecipe:
        for kind, segments in (("train", self.train), ("test", self.test)):
            for segment in segments:
                try:
                    check_segment(segment.length, segment.pairs, self.task.vocab_size, self.task.rewriting)
                except ValueError as error:
                    raise ValueError(f"{kind} segment {segment.name}: {error}") from None
        known = {field.name for field in dataclasses.fields(MomentumDeltaNetConfig)} | {"mixer_options"}
        for mixer, fields in self.mixers.items():
            if mixer not in MIXERS:
                raise ValueError(f"mixers: unknown mixer {mixer!r}{nearest(mixer, MIXERS)}; expected {sorted(MIXERS)}")
            for field in (*self.model, *fields):
                if field not in known:
                    raise ValueError(f"mixers.{mixer} or model: unknown field {field!r}{nearest(field, known)}")
        return self

    def cells(self) -> list[Cell]:
        """Seed by seed, so that an interrupted grid has compared all mixers on the seeds it finished."""
        return [
            Cell(mixer=mixer, hidden_size=hidden_size, learning_rate=rate, seed=seed)
            for seed in self.seeds
            for hidden_size in self.hidden_sizes
            for mixer in self.mixers
            for rate in self.learning_rates
        ]

    def config_of(self, cell: Cell) -> MomentumDeltaNetConfig:
        """The model of a cell: no special tokens, no positions beyond what the mixer has itself."""
        fields = {"vocab_size": self.task.vocab_size, **self.model, **self.mixers[cell.mixer]}
        ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        return MomentumDeltaNetConfig(**{**ends, **fields, "mixer": cell.mixer, "hidden_size": cell.hidden_size})

    def identity_of(self, cell: Cell) -> str:
        """A hash of everything that decides the result of a cell."""
        parts = {
            "task": self.task.model_dump(mode="json"),
            "train": [segment.model_dump(mode="json") for segment in self.train],
            "test": [segment.model_dump(mode="json") for segment in self.test],
            "model": {**self.model, **self.mixers[cell.mixer]},
            "training": self.training.model_dump(mode="json"),
            "cell": cell.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def find_mqar_recipe(name: str | Path) -> Path:
    """A file, or the name of a packaged recipe: `quick`, `mqar/quick`, `recipes/mqar/quick.yaml`."""
    if Path(name).is_file():
        return Path(name)
    packaged = {path.stem: path for path in sorted((PACKAGED / "mqar").glob("*.yaml"))}
    stem = Path(name).stem
    if stem in packaged:
        return packaged[stem]
    raise ValueError(
        f"no MQAR recipe {str(name)!r}{nearest(stem, packaged)}: neither a file nor one of {list(packaged)}"
    )


def load_mqar_recipe(name: str | Path, overrides: Sequence[str] = ()) -> MqarRecipe:
    path = find_mqar_recipe(name)
    content = read_yaml(path)
    for override in overrides:
        apply_override(content, override)
    try:
        return MqarRecipe.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"recipe {path}: " + "; ".join(_explain(detail) for detail in error.errors())) from None


def _explain(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(key.split('.')[-1], MqarRecipe.model_fields)}"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"{key}: {detail['msg']}, got {detail['input']!r}"

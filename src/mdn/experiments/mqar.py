"""Grids of multi-query associative recall: the recipe, its cells, and the training and test of one cell.

A cell is one training run: (mixer, hidden size, learning rate, seed). OUT/cells has their results (see ``grid``) and,
if requested, OUT/models/NAME the trained models.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn

from mdn.common.errors import nearest
from mdn.experiments.mqar_data import Examples, check_segment, generate
from mdn.experiments.tiny_training import TinyTraining, labelled_accuracy, train_tiny
from mdn.layers import MIXERS, Mixer
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.recipe import PACKAGED, Block, apply_override, read_yaml, validate_as

TEST_SEED = 1_000_003  # every cell is tested on the same examples
_TEST_TOKENS = 16_384


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


class CellTraining(Block):
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
    def _one_of_each(self) -> CellTraining:
        for names in (("epochs", "steps"), ("batch_size", "batch_tokens")):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise ValueError(f"training: give exactly one of {names[0]} and {names[1]}")
        return self


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
    training: CellTraining

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

    def cells(self) -> list[MqarCell]:
        """Seed by seed, so that an interrupted grid has compared all mixers on the seeds it finished."""
        return [
            MqarCell(self, mixer, hidden_size, rate, seed)
            for seed in self.seeds
            for hidden_size in self.hidden_sizes
            for mixer in self.mixers
            for rate in self.learning_rates
        ]

    def batch_size(self, segment: Segment) -> int:
        return self.training.batch_size or max(1, int(self.training.batch_tokens or 0) // segment.length)

    @property
    def total_steps(self) -> int:
        if self.training.steps is not None:
            return self.training.steps
        batches = sum(math.ceil(segment.examples / self.batch_size(segment)) for segment in self.train)
        return int(self.training.epochs or 0) * batches

    def examples(self, segment: Segment, number: int, generator: torch.Generator) -> Examples:
        task = self.task
        options: dict[str, Any] = {"vocab_size": task.vocab_size, "power": task.power, "rewriting": task.rewriting}
        return generate(number, segment.length, segment.pairs, generator=generator, **options)


@dataclasses.dataclass(frozen=True)
class MqarCell:
    recipe: MqarRecipe = dataclasses.field(repr=False)
    mixer: str
    hidden_size: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.mixer}-d{self.hidden_size}-lr{self.learning_rate:g}-seed{self.seed}"

    def choice(self) -> dict[str, Any]:
        """What tells this cell from the others of its grid."""
        names = ("mixer", "hidden_size", "learning_rate", "seed")
        return {name: getattr(self, name) for name in names}

    def settings(self) -> dict[str, Any]:
        shared = self.recipe.model_dump(mode="json", include={"task", "train", "test", "training"})
        return {**shared, "model": {**self.recipe.model, **self.recipe.mixers[self.mixer]}, **self.choice()}

    def config(self) -> MomentumDeltaNetConfig:
        """The model of the cell: no special tokens, no positions beyond what the mixer has itself."""
        recipe = self.recipe
        fields = {"vocab_size": recipe.task.vocab_size, **recipe.model, **recipe.mixers[self.mixer]}
        ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        return MomentumDeltaNetConfig(**{**ends, **fields, "mixer": self.mixer, "hidden_size": self.hidden_size})


def batches(recipe: MqarRecipe, seed: int) -> Iterator[Examples]:
    """The training batches of a seed, each of one segment: epochs over a fixed set, or fresh examples every step."""
    generator = torch.Generator().manual_seed(seed)
    if recipe.training.steps is not None:
        shares = torch.tensor([float(segment.examples) for segment in recipe.train])
        for choice in torch.multinomial(shares, recipe.training.steps, replacement=True, generator=generator).tolist():
            segment = recipe.train[choice]
            yield recipe.examples(segment, recipe.batch_size(segment), generator)
        return
    sets = [recipe.examples(segment, segment.examples, generator) for segment in recipe.train]
    for _ in range(int(recipe.training.epochs or 0)):
        orders = [torch.randperm(len(examples), generator=generator) for examples in sets]
        pieces = [
            (number, rows)
            for number, (segment, order) in enumerate(zip(recipe.train, orders))
            for rows in order.split(recipe.batch_size(segment))
        ]
        for place in torch.randperm(len(pieces), generator=generator).tolist():
            number, rows = pieces[place]
            yield sets[number].select(rows)


def train_cell_model(cell: MqarCell, label: str = "") -> tuple[MomentumDeltaNetForCausalLM, Any]:
    """The cell's model, trained, and what ``train_tiny`` says about it."""
    settings = cell.recipe.training
    torch.manual_seed(cell.seed)
    model = MomentumDeltaNetForCausalLM(cell.config())
    training = TinyTraining(
        steps=cell.recipe.total_steps,
        learning_rate=cell.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        warmup=settings.warmup,
        clip=settings.clip,
    )
    return model, train_tiny(model, batches(cell.recipe, cell.seed), training, label=label or cell.name)


def segment_accuracy(model: MomentumDeltaNetForCausalLM, recipe: MqarRecipe) -> dict[str, float]:
    """Accuracy by test segment, "length:pairs"."""
    model.eval()
    found = {}
    for number, segment in enumerate(recipe.test):
        examples = recipe.examples(segment, segment.examples, torch.Generator().manual_seed(TEST_SEED + number))
        rows = max(1, _TEST_TOKENS // segment.length)
        pieces = (examples.select(slice(start, start + rows)) for start in range(0, len(examples), rows))
        found[segment.name] = labelled_accuracy(model, pieces)
    return found


def train_and_test(cell: MqarCell, save_to: Path | None = None) -> dict[str, Any]:
    """The result of a cell; one whose loss stopped being finite has accuracy 0 everywhere."""
    begin, worked = time.perf_counter(), time.process_time()
    model, outcome = train_cell_model(cell)
    trained = time.perf_counter()
    if save_to is not None:
        model.save_pretrained(save_to / cell.name)
    diverged = outcome.diverged_at is not None
    return {
        "cell": cell.choice(),
        "accuracy": dict.fromkeys((s.name for s in cell.recipe.test), 0.0)
        if diverged
        else segment_accuracy(model, cell.recipe),
        "losses": outcome.losses,
        "diverged_at": outcome.diverged_at,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_numbers": state_numbers(model),
        "train_seconds": round(trained - begin, 2),
        "test_seconds": round(time.perf_counter() - trained, 2),
        "processor_seconds": round(time.process_time() - worked, 2),
    }


def state_numbers(model: nn.Module) -> int:
    """Numbers in the recurrent states of all mixers for one sequence (for attention: per token)."""
    shapes = [module.state_shapes() for module in model.modules() if isinstance(module, Mixer)]
    return sum(math.prod(shape) for mixer in shapes for name, (shape, _) in mixer.items() if name != "conv")


# ----------------------------------------------------------------------------------------------------- reading recipes


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
    """Read, override and validate. `mixers=[a, b]` chooses among the recipe's mixers and keeps their fields."""
    path = find_mqar_recipe(name)
    content = read_yaml(path)
    fields = content.get("mixers")
    for override in overrides:
        apply_override(content, override)
    if isinstance(content.get("mixers"), list) and isinstance(fields, dict):
        content["mixers"] = {str(mixer): fields.get(mixer, {}) for mixer in content["mixers"]}
    return validate_as(MqarRecipe, content, str(path))

"""Retrieval: recall of bindings, of rewritten bindings, of the majority of noisy bindings, and of needles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mdn.experiments.mqar import MqarRecipe, batches, load_mqar_recipe, segment_accuracy
from mdn.experiments.studies.contestants import VECTOR_DECAYS
from mdn.experiments.studies.noisy_recall import CONSTANTS, VOCAB_SIZE, generate_noisy_recall, sequence_length
from mdn.experiments.studies.study import (
    EQUAL_PARAMETERS,
    EQUAL_STATE,
    SMALL_MODEL,
    TEST_SEED,
    VECTOR_DECAY_COMPARISONS,
    WITHIN_BOUNDS,
    Comparison,
    Study,
    TokenTask,
)
from mdn.experiments.tiny_needle import NeedleSettings, Words, find_needles, training_batches
from mdn.experiments.tiny_training import LabelledTokens, labelled_accuracy

BATCH_TOKENS = 1024
FULL = ("mdn", "gdn", "mdn-half", "gdn-double", "gdn-bounds", "mu0", "qhm", "qhm-fast")
SHORT = ("mdn", "gdn", "mdn-half", "gdn-double")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TUNING_SEEDS = 3  # where seeds of one model scatter more than the learning rates


@dataclass(frozen=True, kw_only=True)
class RecallTask(TokenTask):
    """The task and the segments of a packaged MQAR recipe."""

    recipe: str

    def loaded(self, steps: int) -> MqarRecipe:
        return load_mqar_recipe(self.recipe, [f"training.steps={steps}"])

    def settings(self) -> dict[str, Any]:
        content = self.loaded(self.steps).model_dump(mode="json")
        return super().settings() | {"recipe": {name: content[name] for name in ("task", "train", "test", "training")}}

    def vocab_size(self) -> int:
        return self.loaded(self.steps).task.vocab_size

    def batches(self, seed: int, steps: int) -> Iterator[Any]:
        return batches(self.loaded(steps), seed)

    def test(self, model: Any) -> dict[str, float]:
        return segment_accuracy(model, self.loaded(self.steps))


@dataclass(frozen=True, kw_only=True)
class NoisyRecallTask(TokenTask):
    train_keys: tuple[int, ...] = (2, 4, 8)
    test_keys: tuple[int, ...] = (4, 8, 16)
    examples: int = 300

    def settings(self) -> dict[str, Any]:
        return super().settings() | CONSTANTS | {"batch_tokens": BATCH_TOKENS}

    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def batches(self, seed: int, steps: int) -> Iterator[LabelledTokens]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            keys = self.train_keys[int(torch.randint(len(self.train_keys), (), generator=generator))]
            yield generate_noisy_recall(BATCH_TOKENS // sequence_length(keys), keys, generator)

    def test(self, model: Any) -> dict[str, float]:
        found = {}
        for keys in self.test_keys:
            inputs, labels = generate_noisy_recall(self.examples, keys, torch.Generator().manual_seed(TEST_SEED + keys))
            found[f"{keys} keys"] = labelled_accuracy(model, map(LabelledTokens, inputs.split(50), labels.split(50)))
        return found


@cache
def _words() -> Words:
    return NeedleSettings().vocabulary()


@dataclass(frozen=True, kw_only=True)
class NeedleTask(TokenTask):
    """Four needles in a text of noise, one of them queried, at five depths."""

    test_lengths: tuple[int, ...] = (128, 256, 512)
    examples: int = 20
    """of every length and depth"""

    def vocab_size(self) -> int:
        return len(_words())

    def needles(self, seed: int, steps: int) -> NeedleSettings:
        return NeedleSettings(test_lengths=self.test_lengths, examples=self.examples, steps=steps, seed=seed)

    def batches(self, seed: int, steps: int) -> Iterator[LabelledTokens]:
        return training_batches(self.needles(seed, steps), _words())

    def test(self, model: Any) -> dict[str, float]:
        found = find_needles(model, self.needles(TEST_SEED, self.steps)).mean(axis=0)
        return {f"{length} tokens": float(share) for length, share in zip(self.test_lengths, found)}


STUDY = Study(
    "retrieval",
    "Does momentum improve recall, at equal parameters and at equal state?",
    (
        RecallTask(
            name="recall",
            title="MQAR",
            contestants=FULL,
            rates=RATES,
            tuning_seeds=TUNING_SEEDS,
            seconds=20,
            steps=1200,
            model=SMALL_MODEL,
            recipe="quick",
        ),
        RecallTask(
            name="rewriting",
            title="MQAR, every key bound twice",
            contestants=FULL + VECTOR_DECAYS,
            rates=RATES,
            tuning_seeds=TUNING_SEEDS,
            seconds=10,
            steps=800,
            model=SMALL_MODEL,
            recipe="rewrite",
        ),
        NoisyRecallTask(
            name="noisy recall",
            title="the majority of five bindings",
            contestants=FULL,
            rates=RATES,
            seconds=16,
            steps=800,
            model=SMALL_MODEL,
        ),
        NeedleTask(
            name="needle",
            phrase="needles",
            title="four needles in noise",
            contestants=SHORT,
            rates=RATES,
            seconds=20,
            steps=400,
            model=SMALL_MODEL,
        ),
    ),
    (
        EQUAL_PARAMETERS,
        *EQUAL_STATE,
        Comparison("gdn", "gdn-bounds", "equal parameters (without and with MDN's bounds)"),
        *WITHIN_BOUNDS,
        Comparison("qhm", "mdn", "equal state (quasi-hyperbolic momentum against the paper's)"),
        Comparison("qhm-fast", "mdn", "equal state (quasi-hyperbolic, mu 10 x faster, against the paper's momentum)"),
        *VECTOR_DECAY_COMPARISONS,
    ),
)

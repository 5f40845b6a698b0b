"""Oscillation: can a memory hold a phase? Tested at one, two and four times the length of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn.experiments.studies.contestants import VECTOR_DECAYS
from mdn.experiments.studies.series_model import (
    SERIES_MODEL,
    SeriesModel,
    predictions,
    squared_error,
    weighted_squares,
)
from mdn.experiments.studies.signals import CHANNELS, CONSTANTS, SEEN, SIGNALS, Signals
from mdn.experiments.studies.study import (
    EQUAL_PARAMETERS,
    EQUAL_STATE,
    ERROR,
    TEST_SEED,
    VECTOR_DECAY_COMPARISONS,
    WITHIN_BOUNDS,
    Metric,
    Study,
    Task,
)

BATCH_TOKENS = 1024
MULTIPLES = (1, 2, 4)
CONTESTANTS = ("mdn", "gdn", "mdn-half", "gdn-double", "qhm", "mu0", "comba", "mdn-fast", "qhm-fast", "mamba2")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True, kw_only=True)
class OscillationTask(Task):
    """Squared error at the scored tokens, divided by the power of the signal there."""

    signal: str
    length: int
    examples: int = 64
    metric: ClassVar[Metric] = ERROR

    def settings(self) -> dict[str, Any]:
        return super().settings() | CONSTANTS[self.signal] | {"batch_tokens": BATCH_TOKENS, "multiples": MULTIPLES}

    def build(self, fields: dict[str, Any]) -> nn.Module:
        return SeriesModel(CHANNELS[self.signal], fields)

    def batches(self, seed: int, steps: int) -> Iterator[Signals]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            yield SIGNALS[self.signal](BATCH_TOKENS // self.length, self.length, generator)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return squared_error(model, batch)

    def test(self, model: Any) -> dict[str, float]:
        """One set of the longest signals; each stretch is scored by itself, so that "4x" is what lies beyond "2x"."""
        longest = max(MULTIPLES) * self.length
        batch = SIGNALS[self.signal](self.examples, longest, torch.Generator().manual_seed(TEST_SEED))
        difference = predictions(model, batch.inputs) - batch.targets
        found, begin = {}, 0
        for multiple in MULTIPLES:
            part = slice(begin, multiple * self.length)
            power = weighted_squares(batch.targets[:, part], batch.weights[:, part])
            found[f"{multiple}x"] = float(weighted_squares(difference[:, part], batch.weights[:, part]) / power)
            begin = multiple * self.length
        return found


STUDY = Study(
    "oscillation",
    "Do the complex eigenvalues of the momentum rule help where the signal oscillates?",
    (
        OscillationTask(
            name="resonator",
            phrase="the resonator",
            title="impulses in, two damped oscillations out",
            contestants=CONTESTANTS + VECTOR_DECAYS,
            rates=RATES,
            seconds=14,
            steps=400,
            model=SERIES_MODEL,
            signal="resonator",
            length=128,
        ),
        OscillationTask(
            name="continuation",
            phrase="the continuation of a sinusoid",
            title=f"a damped sinusoid continued from {SEEN} tokens",
            contestants=CONTESTANTS,
            rates=RATES,
            seconds=20,
            steps=600,
            model=SERIES_MODEL,
            signal="continuation",
            length=96,
        ),
    ),
    (EQUAL_PARAMETERS, *EQUAL_STATE, *WITHIN_BOUNDS, *VECTOR_DECAY_COMPARISONS),
)

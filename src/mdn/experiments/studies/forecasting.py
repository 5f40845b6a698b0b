"""Forecasting: one model for four real series, one step and many steps ahead, against simple baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mdn.experiments.studies.real_series import (
    RealSeries,
    autoregression,
    chosen_order,
    iterated,
    level_errors,
    origins,
    real_series,
)
from mdn.experiments.studies.series_model import SERIES_MODEL, SeriesModel, squared_error
from mdn.experiments.studies.signals import Signals
from mdn.experiments.studies.study import EQUAL_PARAMETERS, EQUAL_STATE, Metric, Study, Task

CONTEXT, ROWS = 96, 8
HORIZONS = (1, 16)
ORIGINS = 48
INPUT_NOISE = 0.1
SKILL = Metric("squared error / persistence's", higher_is_better=False, worst=1.0, quantity="error")
Forecaster = Callable[[RealSeries, np.ndarray], np.ndarray]
"""contexts [origins, CONTEXT] of a series -> forecast differences [origins, max(HORIZONS)]"""


def scores(forecast: Forecaster) -> dict[str, float]:
    """On the test parts, by series and number of steps."""
    found = {}
    for series in real_series():
        places = origins(series, CONTEXT, max(HORIZONS), ORIGINS)
        contexts = np.stack([series.differences[place - CONTEXT : place] for place in places])
        actual = np.stack([series.differences[place : place + max(HORIZONS)] for place in places])
        predicted = forecast(series, contexts)
        for steps in HORIZONS:
            persistence = level_errors(np.zeros_like(actual), actual, steps)
            found[f"{series.name}, {steps}"] = level_errors(predicted, actual, steps) / persistence
    return found


@dataclass(frozen=True, kw_only=True)
class ForecastTask(Task):
    metric: ClassVar[Metric] = SKILL

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"context": CONTEXT, "rows": ROWS, "input_noise": INPUT_NOISE}

    def build(self, fields: dict[str, Any]) -> nn.Module:
        return SeriesModel(1, fields)

    def batches(self, seed: int, steps: int) -> Iterator[Signals]:
        """Windows of all series; the short series are varied by a random sign, a random scale and noisy inputs."""
        source = np.random.default_rng(seed)
        for _ in range(steps):
            yield window_batch(source)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return squared_error(model, batch)

    @torch.no_grad()
    def test(self, model: Any) -> dict[str, float]:
        def forecast(series: RealSeries, contexts: np.ndarray) -> np.ndarray:
            values = torch.from_numpy(contexts).float()
            for _ in range(max(HORIZONS)):
                values = torch.cat([values, model(values.unsqueeze(2))[:, -1:]], dim=1)
            return values[:, CONTEXT:].numpy()

        return scores(forecast)

    def baselines(self) -> dict[str, dict[str, float]]:
        def forecast(series: RealSeries, contexts: np.ndarray) -> np.ndarray:
            weights = autoregression(series.training, chosen_order(series.training))
            return iterated(weights, contexts, max(HORIZONS))

        return {"autoregression": scores(forecast)}


def window_batch(source: np.random.Generator) -> Signals:
    """ROWS windows of CONTEXT differences; the target of every one is the next."""
    windows = []
    for _ in range(ROWS):
        training = real_series()[source.integers(len(real_series()))].training
        begin = source.integers(len(training) - CONTEXT)
        scale = source.choice([-1.0, 1.0]) * np.exp(source.uniform(-0.5, 0.5))
        windows.append(scale * training[begin : begin + CONTEXT + 1])
    values = torch.from_numpy(np.stack(windows)).float()
    noise = INPUT_NOISE * torch.from_numpy(source.standard_normal((ROWS, CONTEXT))).float()
    return Signals((values[:, :-1] + noise).unsqueeze(2), values[:, 1:], torch.ones(ROWS, CONTEXT))


STUDY = Study(
    "forecasting",
    "Does momentum help to forecast real series that oscillate?",
    (
        ForecastTask(
            name="four series",
            phrase="the four series",
            title="ECG, sunspots, CO2 and El Nino; 1 and 16 steps ahead",
            contestants=("mdn", "gdn", "mdn-half", "gdn-double", "qhm"),
            rates=(3e-4, 1e-3, 3e-3, 1e-2),
            seconds=16,
            steps=300,
            model=SERIES_MODEL,
        ),
    ),
    (EQUAL_PARAMETERS, *EQUAL_STATE),
)

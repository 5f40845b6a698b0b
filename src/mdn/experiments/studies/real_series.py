"""Real series that ship inside Python packages, as differences, and the forecasts that cost nothing to make.

    ecg        PyWavelets: an electrocardiogram, 1024 samples
    sunspots   statsmodels: sunspots by year since 1700
    co2        statsmodels: carbon dioxide over Mauna Loa by week, gaps interpolated
    nino       statsmodels: temperature of the Pacific by month since 1950

Every series is differenced and divided by the standard deviation of its training part, the first 70 %. A forecast
predicts differences; its error is that of their sum, so that a forecast over h steps is one of the level. Persistence
forecasts no change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

TRAINED_SHARE = 0.7
ORDERS = (1, 2, 4, 8, 16, 32)
"""of autoregressions, of which one is chosen on the last fifth of the training part"""


@dataclass(frozen=True)
class RealSeries:
    name: str
    differences: np.ndarray
    """[n], divided by the standard deviation of the training part"""
    split: int
    """the first ``split`` of them are for training"""

    @property
    def training(self) -> np.ndarray:
        return self.differences[: self.split]


def as_differences(name: str, levels: np.ndarray) -> RealSeries:
    differences = np.diff(np.asarray(levels, dtype=np.float64))
    split = math.floor(TRAINED_SHARE * len(differences))
    return RealSeries(name, differences / differences[:split].std(), split)


@cache
def real_series() -> tuple[RealSeries, ...]:
    try:
        import pywt.data
        from statsmodels.datasets import co2, elnino, sunspots
    except ImportError as error:
        raise ImportError(
            f"the real series need PyWavelets and statsmodels ({error}); install momentum-deltanet[study]"
        ) from None
    weeks = co2.load_pandas().data["co2"].interpolate()
    months = elnino.load_pandas().data.set_index("YEAR").to_numpy().ravel()
    return (
        as_differences("ecg", pywt.data.ecg()),
        as_differences("sunspots", sunspots.load_pandas().data["SUNACTIVITY"].to_numpy()),
        as_differences("co2", weeks.to_numpy()),
        as_differences("nino", months),
    )


def origins(series: RealSeries, context: int, horizon: int, most: int) -> np.ndarray:
    """At most ``most`` places, evenly spread, from which the next ``horizon`` differences all lie in the test part."""
    first, last = max(series.split, context), len(series.differences) - horizon
    return np.unique(np.linspace(first, last, most).round().astype(int))


def level_errors(forecast: np.ndarray, actual: np.ndarray, steps: int) -> float:
    """Mean squared error of the level after ``steps`` steps; forecast and actual differences ``[origins, horizon]``."""
    return float(np.square((forecast - actual)[:, :steps].sum(axis=1)).mean())


def autoregression(training: np.ndarray, order: int) -> np.ndarray:
    """Coefficients [order], the newest value first, by least squares without a constant."""
    columns = [training[order - 1 - lag : len(training) - 1 - lag] for lag in range(order)]
    return np.linalg.lstsq(np.stack(columns, axis=1), training[order:], rcond=None)[0]


def chosen_order(training: np.ndarray) -> int:
    """The order whose one-step forecasts of the last fifth of the training part are best."""
    cut = math.floor(0.8 * len(training))

    def error(order: int) -> float:
        weights = autoregression(training[:cut], order)
        windows = np.lib.stride_tricks.sliding_window_view(training[cut - order : -1], order)[:, ::-1]
        return float(np.square(windows @ weights - training[cut:]).mean())

    return min((order for order in ORDERS if 3 * order < cut), key=error)


def iterated(weights: np.ndarray, context: np.ndarray, horizon: int) -> np.ndarray:
    """[origins, horizon]: forecasts that are fed back, from contexts ``[origins, n]``."""
    values = context.copy()
    for _ in range(horizon):
        newest_first = values[:, ::-1][:, : len(weights)]
        values = np.concatenate([values, (newest_first @ weights)[:, None]], axis=1)
    return values[:, context.shape[1] :]

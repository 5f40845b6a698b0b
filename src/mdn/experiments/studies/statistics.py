"""Means over seeds with 95 % confidence intervals (Student's t), and what two of them say about each other.

With five seeds the interval is 1.24 standard deviations to either side. Differences have Welch's interval, which does
not assume that both models vary alike from seed to seed.

Whether two models differ is decided by an exact permutation test: scores near a ceiling, or of models that either learn
a task or fail, are far from normal, and Welch's interval may then include zero although every seed of one model is
better than every seed of the other. With fewer than four seeds no order of the scores is rare enough for that test, and
Welch's interval decides.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# The 0.975 quantile of Student's t for 1, 2, ... 30 degrees of freedom; beyond them the normal one is within 4 %.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.960
SIGNIFICANT = 0.05
SEEDS_TO_PERMUTE = 4
"""on both sides: of 70 ways to divide eight scores two are as far apart as can be, p = 0.03; of 20 for six, p = 0.1"""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval; infinitely wide for a single value."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def leaves_out_zero(self) -> bool:
        return abs(self.mean) > self.half_width


def t_quantile(degrees: float) -> float:
    """The 0.975 quantile of Student's t; fractional degrees of freedom are rounded down, which widens the interval."""
    whole = math.floor(degrees)
    if whole < 1:
        return math.inf
    return _T975[whole - 1] if whole <= len(_T975) else _NORMAL


def mean_interval(values: Sequence[float]) -> Interval:
    if len(values) < 2:
        return Interval(statistics.fmean(values), math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), t_quantile(len(values) - 1) * error)


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Mean of ``first`` minus mean of ``second``, by Welch."""
    mean = statistics.fmean(first) - statistics.fmean(second)
    if len(first) < 2 or len(second) < 2:
        return Interval(mean, math.inf)
    squares = [statistics.variance(values) / len(values) for values in (first, second)]
    if sum(squares) == 0:
        return Interval(mean, 0.0)
    weights = sum(square**2 / (len(values) - 1) for square, values in zip(squares, (first, second)))
    return Interval(mean, t_quantile(sum(squares) ** 2 / weights) * math.sqrt(sum(squares)))


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The share of all ways to divide the scores in which the means differ at least as much; None with few seeds."""
    if min(len(first), len(second)) < SEEDS_TO_PERMUTE:
        return None
    scores = [*first, *second]
    total, size = math.fsum(scores), len(first)

    def gap(part: Sequence[float]) -> float:
        mine = math.fsum(part)
        return abs(mine / size - (total - mine) / (len(scores) - size))

    found = gap(first) * (1 - 1e-9)  # the same division, summed in another order
    gaps = [gap(part) for part in itertools.combinations(scores, size)]
    return sum(other >= found for other in gaps) / len(gaps)


def is_told_apart(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the permutation test finds a difference; with few seeds, whether Welch's interval leaves out zero."""
    p = permutation_p(first, second)
    return difference_interval(first, second).leaves_out_zero if p is None else p < SIGNIFICANT

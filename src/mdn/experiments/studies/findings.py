"""What the recorded seeds say about two contestants: better, worse, or no significant difference."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from mdn.common.results import Table
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.statistics import difference_interval, is_told_apart, permutation_p
from mdn.experiments.studies.study import Comparison, Metric
from mdn.experiments.studies.summary import metric_of, seed_means, with_interval

FIRST, SECOND, LEVEL, UNDECIDED = "first", "second", "level", "undecided"


class Finding(NamedTuple):
    """What the recorded seeds of a task say about a comparison."""

    task: dict[str, Any]
    comparison: Comparison
    first: list[float]
    second: list[float]

    @property
    def metric(self) -> Metric:
        return metric_of(self.task)

    @property
    def means(self) -> tuple[float, float]:
        return statistics.fmean(self.first), statistics.fmean(self.second)

    def verdict(self) -> str:
        """FIRST or SECOND if it is significantly better; UNDECIDED while seeds are missing."""
        if min(len(self.first), len(self.second)) < self.task["seeds"]:
            return UNDECIDED
        if not is_told_apart(self.first, self.second):
            return LEVEL
        return FIRST if self.metric.better(*self.means) else SECOND


def labels(comparison: Comparison) -> tuple[str, str]:
    return CONTESTANTS[comparison.first].label, CONTESTANTS[comparison.second].label


def findings(content: dict[str, Any], comparison: Comparison) -> list[Finding]:
    """Of every task in which both are contestants and at least one seed of each is recorded."""
    found = []
    for task in content["tasks"]:
        rows = {row["contestant"]: seed_means(row) for row in task["rows"]}
        if comparison.first in rows and comparison.second in rows:
            found.append(Finding(task, comparison, rows[comparison.first], rows[comparison.second]))
    return found


def comparison_table(content: dict[str, Any]) -> Table:
    """Differences with Welch's 95 % interval and p of the permutation test, which decides if there is one."""
    rows = []
    for comparison in STUDIES[content["study"]].comparisons:
        first, second = labels(comparison)
        words = {
            FIRST: f"{first} is better",
            SECOND: f"{second} is better",
            LEVEL: "no significant difference",
            UNDECIDED: "seeds are missing",
        }
        for finding in findings(content, comparison):
            metric = finding.metric
            mean, half = difference_interval(finding.first, finding.second)
            gap = metric.shown(mean) if math.isinf(half) else f"{metric.shown(mean)} ± {metric.shown(half)}"
            each = [with_interval(metric, values) for values in (finding.first, finding.second)]
            p = permutation_p(finding.first, finding.second)
            row = [finding.task["name"], f"{first} and {second}", comparison.what, *each, gap]
            rows.append([*row, "–" if p is None else f"{p:.3f}", words[finding.verdict()]])
    return Table("", ["task", "between", "equal", "first", "second", "difference", "p", "verdict"], rows)

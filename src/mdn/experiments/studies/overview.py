"""Where momentum pays: all studies in one figure, as the ratio of MDN's error to that of Gated DeltaNet's rule.

The error of a task is 1 - accuracy, the squared error, or the bits per byte. The ratio is one of geometric means over
seeds; its interval is Welch's for the difference of the logarithms. Below 1 momentum pays.
"""

from __future__ import annotations

import math
from typing import Any

from mdn.common.plots import COLOURS, figure
from mdn.common.results import Table
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.statistics import difference_interval
from mdn.experiments.studies.study import EQUAL_PARAMETERS, EQUAL_STATE, Comparison
from mdn.experiments.studies.summary import metric_of, seed_means

SMALLEST_ERROR = 1e-4
"""of an accuracy that tests of a few thousand answers can tell from 1"""
COMPARISONS = (EQUAL_PARAMETERS, *EQUAL_STATE)


def summarise_overview(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """From the summaries of the studies: the tasks in which every seed of both contestants is recorded."""
    rows = []
    for content in contents:
        for task in content["tasks"]:
            errors = {row["contestant"]: log_errors(row, task) for row in task["rows"]}
            for comparison in COMPARISONS:
                first, second = errors.get(comparison.first, []), errors.get(comparison.second, [])
                if min(len(first), len(second)) >= task["seeds"]:
                    mean, half = difference_interval(first, second)
                    ratio = {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
                    names = {"study": content["study"], "task": task["name"], "seeds": len(first)}
                    rows.append(names | comparison._asdict() | ratio)
    return {"command": "mdn study all", "rows": rows}


def log_errors(row: dict[str, Any], task: dict[str, Any]) -> list[float]:
    means = seed_means(row)
    errors = [1 - mean for mean in means] if metric_of(task).higher_is_better else means
    return [math.log(max(error, SMALLEST_ERROR)) for error in errors]


def between(row: dict[str, Any]) -> str:
    return f"{CONTESTANTS[row['first']].label} / {CONTESTANTS[row['second']].label}"


def tables(content: dict[str, Any]) -> list[Table]:
    rows = [
        [
            row["task"],
            between(row),
            row["what"],
            f"{row['seeds']}",
            f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
        ]
        for row in content["rows"]
    ]
    return [Table("ratio of errors, 95 % interval", ["task", "between", "equal", "seeds", "ratio"], rows)]


def draw(content: dict[str, Any]) -> Any:
    """A line per task, a marker per comparison, on a logarithmic axis."""
    rows = content["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    fig, axis = figure("Where momentum pays", size=(7.2, 0.55 * len(tasks) + 1.6))
    for number, comparison in enumerate(COMPARISONS):
        mine = [row for row in rows if Comparison(row["first"], row["second"], row["what"]) == comparison]
        if not mine:
            continue
        axis.errorbar(
            [row["ratio"] for row in mine],
            [tasks.index(row["task"]) + 0.22 * (number - 1) for row in mine],
            xerr=[[row["ratio"] - row["low"] for row in mine], [row["high"] - row["ratio"] for row in mine]],
            fmt="o",
            color=COLOURS[number],
            capsize=3,
            label=f"{between(mine[0])}: {comparison.equal}",
        )
    axis.axvline(1.0, color="#999999", linewidth=0.8)
    axis.set_xscale("log")
    ratios = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)
    low, high = axis.get_xlim()
    axis.set_xticks([ratio for ratio in ratios if low <= ratio <= high], minor=False)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_yticks(range(len(tasks)), tasks)
    axis.set_ylim(len(tasks) - 0.5, -0.5)
    axis.set_xlabel("error with momentum / error without (left of the line momentum pays)")
    fig.legend(fontsize=8, loc="outside lower center", ncols=1)
    return fig

"""Where momentum pays: all studies in one figure, as the ratio of MDN's error to that of Gated DeltaNet's rule.

The error of a task is 1 - accuracy, the squared error, or the bits per byte. The ratio is one of geometric means over
seeds; its interval is Welch's for the difference of the logarithms. Below 1 momentum pays.

A task counts as learnt if some model of the study reaches, in the mean over its seeds and in at least one test, half of
the way from knowing nothing (chance, or no right answer, or the error of predicting zero) to a perfect score.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from mdn.common.plots import COLOURS, figure
from mdn.common.results import Table
from mdn.experiments.studies.answers import half_way, listed, paragraph
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.statistics import difference_interval
from mdn.experiments.studies.study import EQUAL_PARAMETERS, EQUAL_STATE, Comparison
from mdn.experiments.studies.summary import metric_of, seed_means

SMALLEST_ERROR = 1e-4
"""of an accuracy that tests of a few thousand answers can tell from 1"""
COMPARISONS = (EQUAL_PARAMETERS, *EQUAL_STATE)
LOWER, HIGHER, SAME = "lower", "higher", "same"


def summarise_overview(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """From the summaries of the studies: the tasks in which every seed of both contestants is recorded."""
    rows = []
    for content in contents:
        for task in content["tasks"]:
            errors = {row["contestant"]: log_errors(row, task) for row in task["rows"]}
            names = {"study": content["study"], "task": task["name"], "phrase": task["phrase"], "learnt": learnt(task)}
            for comparison in COMPARISONS:
                first, second = errors.get(comparison.first, []), errors.get(comparison.second, [])
                if min(len(first), len(second)) >= task["seeds"]:
                    mean, half = difference_interval(first, second)
                    ratio = {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
                    rows.append(names | {"seeds": len(first)} | comparison._asdict() | ratio)
    return {"command": "mdn study all", "rows": rows}


def learnt(task: dict[str, Any]) -> bool:
    """Whether some model gets half of the way in some test."""
    scores = [(test, statistics.fmean(values)) for row in task["rows"] for test, values in row["scores"].items()]
    return any(half_way(task, test, mean) for test, mean in scores)


def log_errors(row: dict[str, Any], task: dict[str, Any]) -> list[float]:
    means = seed_means(row)
    errors = [1 - mean for mean in means] if metric_of(task).higher_is_better else means
    return [math.log(max(error, SMALLEST_ERROR)) for error in errors]


def compared(row: dict[str, Any]) -> Comparison:
    return Comparison(row["first"], row["second"], row["what"])


def between(row: dict[str, Any]) -> str:
    return f"{CONTESTANTS[row['first']].label} / {CONTESTANTS[row['second']].label}"


def task_label(row: dict[str, Any]) -> str:
    """The task with its study, because names such as "bytes" say too little by themselves."""
    return f"{row['study'].replace('-', ' ')}: {row['task']}{'' if row['learnt'] else ' (not learnt)'}"


def tables(content: dict[str, Any]) -> list[Table]:
    rows = [
        [
            task_label(row),
            between(row),
            row["what"],
            f"{row['seeds']}",
            f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
        ]
        for row in content["rows"]
    ]
    return [Table("ratio of errors, 95 % interval", ["task", "between", "equal", "seeds", "ratio"], rows)]


def in_words(content: dict[str, Any]) -> str:
    """The figure in sentences: where the interval of the ratio leaves out 1, at equal parameters and at equal state."""
    by_task: dict[str, dict[Comparison, dict[str, Any]]] = {}
    for row in content["rows"]:
        by_task.setdefault(row["phrase"], {})[compared(row)] = row
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    not_learnt = []
    for task, rows in by_task.items():
        if not all(row["learnt"] for row in rows.values()):
            not_learnt.append(task)
        elif EQUAL_PARAMETERS in rows:
            at_state = sorted(_side(rows[comparison]) for comparison in EQUAL_STATE if comparison in rows)
            groups.setdefault((_side(rows[EQUAL_PARAMETERS]), tuple(at_state)), []).append(task)
    order = (LOWER, HIGHER, SAME)
    ordered = sorted(groups, key=lambda sides: order.index(sides[0]))
    names = ["Momentum", *["It"] * len(ordered)]
    sentences = [f"{name} {_predicate(*sides, groups[sides])}" for name, sides in zip(names, ordered)]
    if not_learnt:
        sentences.append(f"No model learns {listed(not_learnt, 'or')}, so that these tasks decide nothing")
    return paragraph(sentences)


def _predicate(at_parameters: str, at_state: tuple[str, ...], tasks: list[str]) -> str:
    """What momentum does to the error of some tasks at equal parameters, and in the two comparisons at equal state."""
    verbs = {LOWER: "lowers the error", HIGHER: "raises the error", SAME: "makes no measurable difference"}
    said = f"{verbs[at_parameters]} on {listed(tasks)} at equal parameters"
    different = [side for side in at_state if side != SAME]
    if not at_state:
        return f"{said} (equal state is not recorded)"
    if set(at_state) == {at_parameters}:
        return f"{said} and at equal state"
    if not different:
        return f"{said}, not at equal state"
    if len(set(different)) > 1:
        return f"{said}, and the two comparisons at equal state contradict each other"
    number = "both" if len(different) == len(at_state) else "one"
    again = "" if different[0] == at_parameters else f" it {verbs[different[0]]}"
    return f"{said}, and{again} in {number} of the two comparisons at equal state"


def _side(row: dict[str, Any]) -> str:
    return LOWER if row["high"] < 1 else HIGHER if row["low"] > 1 else SAME


def draw(content: dict[str, Any]) -> Any:
    """A line per task, a marker per comparison, on a logarithmic axis."""
    rows = content["rows"]
    tasks = list(dict.fromkeys(task_label(row) for row in rows))
    fig, axis = figure("Where momentum pays", size=(7.2, 0.55 * len(tasks) + 1.6))
    for number, comparison in enumerate(COMPARISONS):
        mine = [row for row in rows if compared(row) == comparison]
        if not mine:
            continue
        axis.errorbar(
            [row["ratio"] for row in mine],
            [tasks.index(task_label(row)) + 0.22 * (number - 1) for row in mine],
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

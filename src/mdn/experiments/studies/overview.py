"""Where momentum pays: all studies in one figure, as the ratio of MDN's error to that of Gated DeltaNet's rule.

The error of a task is 1 - accuracy, the squared error, or the bits per byte. The ratio is one of geometric means over
seeds; its interval is Welch's for the difference of the logarithms. Below 1 MDN is ahead.

The sentences follow the verdicts of the studies' pages. Where the ratio's interval says something else, they say so.
"""

from __future__ import annotations

import math
from typing import Any

from mdn.common.plots import figure
from mdn.common.results import Table
from mdn.experiments.studies.answers import COUNTS, learnt, listed, paragraph
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.findings import FIRST, LEVEL, SECOND, UNDECIDED, findings
from mdn.experiments.studies.statistics import difference_interval
from mdn.experiments.studies.study import EQUAL_PARAMETERS, EQUAL_STATE, Comparison, Metric

SMALLEST_ERROR = 1e-4
"""of an accuracy that tests of a few thousand answers can tell from 1"""
COMPARISONS = (EQUAL_PARAMETERS, *EQUAL_STATE)
MARKERS, GREYS = ("o", "s", "^"), ("#111111", "#666666", "#A0A0A0")
"""of the comparisons; colours stand for models in the other figures"""


def summarise_overview(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """From the summaries of the studies: the tasks in which every seed of both contestants is recorded."""
    rows = []
    for content in contents:
        for finding in (entry for comparison in COMPARISONS for entry in findings(content, comparison)):
            if finding.verdict() == UNDECIDED:
                continue
            task, metric = finding.task, finding.metric
            mean, half = difference_interval(log_errors(finding.first, metric), log_errors(finding.second, metric))
            ratio = {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
            names = {"study": content["study"], "task": task["name"], "phrase": task["phrase"], "learnt": learnt(task)}
            found = {"seeds": len(finding.first), "verdict": finding.verdict()}
            rows.append(names | found | finding.comparison._asdict() | ratio)
    return {"command": "mdn study all", "rows": rows}


def log_errors(scores: list[float], metric: Metric) -> list[float]:
    errors = [1 - score for score in scores] if metric.higher_is_better else scores
    return [math.log(max(error, SMALLEST_ERROR)) for error in errors]


def compared(row: dict[str, Any]) -> Comparison:
    return Comparison(row["first"], row["second"], row["what"])


def between(row: dict[str, Any]) -> str:
    return f"{CONTESTANTS[row['first']].label} / {CONTESTANTS[row['second']].label}"


def task_label(row: dict[str, Any]) -> str:
    """The task with its study, because names such as "bytes" say too little by themselves."""
    notes = [] if row["learnt"] else ["not learnt"]
    notes += [] if row["seeds"] >= 5 else [f"{COUNTS[row['seeds']]} seeds"]
    in_brackets = f" ({', '.join(notes)})" if notes else ""
    return f"{row['study'].replace('-', ' ')}: {row['task']}{in_brackets}"


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
    """A list: on which tasks MDN's error is lower or higher, at equal parameters and at equal state."""
    by_task: dict[str, dict[Comparison, dict[str, Any]]] = {}
    for row in content["rows"]:
        phrase = row["phrase"] if row["seeds"] >= 5 else f"{row['phrase']} ({COUNTS[row['seeds']]} seeds)"
        by_task.setdefault(phrase, {})[compared(row)] = row
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    not_learnt = []
    for task, rows in by_task.items():
        if not all(row["learnt"] for row in rows.values()):
            not_learnt.append(task)
        elif EQUAL_PARAMETERS in rows:
            at_state = sorted(rows[comparison]["verdict"] for comparison in EQUAL_STATE if comparison in rows)
            groups.setdefault((rows[EQUAL_PARAMETERS]["verdict"], tuple(at_state)), []).append(task)
    order = (FIRST, SECOND, LEVEL)
    ordered = sorted(groups, key=lambda verdicts: order.index(verdicts[0]))
    points = [_point(*verdicts, groups[verdicts]) for verdicts in ordered]
    points += [
        _disagreement(row) for row in content["rows"] if row["learnt"] and verdict_of_ratio(row) != row["verdict"]
    ]
    if not_learnt:
        points.append(f"No model learns {listed(not_learnt, 'or')}, so these tasks are inconclusive")
    return "\n".join(paragraph([point], begin="- ") for point in points)


def _point(at_parameters: str, at_state: tuple[str, ...], tasks: list[str]) -> str:
    """What the comparison of some tasks finds at equal parameters, and the two comparisons at equal state."""
    finds = {
        FIRST: "MDN's error is lower than GDN's",
        SECOND: "MDN's error is higher than GDN's",
        LEVEL: "no measurable difference",
    }
    said = f"{listed(tasks)}: {finds[at_parameters]} at equal parameters"
    said = said[0].upper() + said[1:]
    different = [verdict for verdict in at_state if verdict != LEVEL]
    if not at_state:
        return f"{said} (equal state was not compared)"
    if set(at_state) == {at_parameters}:
        return f"{said} and at equal state"
    if not different:
        return f"{said}, but not at equal state"
    if len(set(different)) > 1:
        return f"{said}, and the two comparisons at equal state contradict each other"
    number = "both" if len(different) == len(at_state) else "one"
    again = "" if different[0] == at_parameters else f" {finds[different[0]]}"
    return f"{said}, and{again} in {number} of the two comparisons at equal state"


def verdict_of_ratio(row: dict[str, Any]) -> str:
    """Whether the interval of the ratio leaves out 1, on which side."""
    return FIRST if row["high"] < 1 else SECOND if row["low"] > 1 else LEVEL


def _disagreement(row: dict[str, Any]) -> str:
    """The figure's interval and the page's verdict are two tests of the same seeds, and one of them finds something."""
    where = f"{row['phrase']} at {compared(row).equal} ({between(row)})"
    ratio, test = ("includes", "finds a") if row["verdict"] != LEVEL else ("leaves out", "finds no")
    return f"On {where} the interval in the figure {ratio} 1, but the test of the page {test} difference"


def draw(content: dict[str, Any]) -> Any:
    """A line per task, a marker per comparison, on a logarithmic axis."""
    rows = content["rows"]
    tasks = list(dict.fromkeys(task_label(row) for row in rows))
    fig, axis = figure("Where momentum pays", size=(7.2, 0.55 * len(tasks) + 1.6))
    compared_on = {task: [compared(row) for row in rows if task_label(row) == task] for task in tasks}

    def height(row: dict[str, Any]) -> float:
        """The lines of a task lie around its tick."""
        mine = compared_on[task_label(row)]
        return tasks.index(task_label(row)) + 0.22 * (mine.index(compared(row)) - (len(mine) - 1) / 2)

    for number, comparison in enumerate(COMPARISONS):
        mine = [row for row in rows if compared(row) == comparison]
        if not mine:
            continue
        axis.errorbar(
            [row["ratio"] for row in mine],
            [height(row) for row in mine],
            xerr=[[row["ratio"] - row["low"] for row in mine], [row["high"] - row["ratio"] for row in mine]],
            fmt=MARKERS[number],
            color=GREYS[number],
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
    axis.set_xlabel("MDN's error / error of GDN's rule in the same layer  (← MDN is ahead)")
    fig.legend(fontsize=8, loc="outside lower center", ncols=1)
    return fig

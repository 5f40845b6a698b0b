"""What a study has found so far: a summary of its recorded cells, and tables and a figure of the summary.

A number in a table is the mean over seeds ± half of its 95 % confidence interval (Student's t).
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from mdn.common.plots import figure, legend_outside
from mdn.common.results import Table
from mdn.experiments.grid import finished
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.statistics import mean_interval
from mdn.experiments.studies.study import CORPUS, Metric, Study, StudyCell, Task, mean_score

Row = dict[str, Any]
"""a contestant in a task: its facts, ``seeds``, and ``scores`` with a list over the seeds for every test"""


def summarise(study: Study, out: Path) -> dict[str, Any]:
    """Reads the recorded cells below ``out``."""
    progress = study.progress(out)
    spent = 0.0
    tasks = []
    for task in study.tasks:
        tuning = finished(study.tuning_cells(task, out), out / study.name) if task.rates_from is None else {}
        cells = study.reported_cells(task, out)
        results = finished(cells, out / study.name)
        check_same_text(task, {**tuning, **results})
        spent += sum(result["processor_seconds"] for result in (*tuning.values(), *results.values()))
        rows = [_row(name, task, cells, results) for name in task.contestants]
        for row in rows:
            row["tuning"] = {
                f"{rate:g}": mean for rate, mean in study.tuning_means(task, row["contestant"], out).items()
            }
            row["other_rates"] = _other_rates(study, task, row, out)
        tasks.append(
            {
                "name": task.name,
                "title": task.title,
                "phrase": task.phrase or task.name,
                "steps": task.steps,
                "batch_tokens": task.settings().get("batch_tokens"),
                "seeds": task.seeds,
                "tuning_seeds": (task.rates_from or task).tuning_seeds,
                "rates": task.rates,
                "metric": vars(task.metric),
                "baselines": next(iter(results.values()), {}).get("baselines", {}),
                "rows": [row for row in rows if row["seeds"]],
            }
        )
    return {
        "command": f"mdn study {study.name}",
        "study": study.name,
        "question": study.question,
        "cells": progress.cells,
        "of": progress.of,
        "processor_minutes": round(spent / 60, 1),
        "tasks": tasks,
    }


def check_same_text(task: Task, results: dict[str, Any]) -> None:
    """Refuses cells of one task that were trained on different texts: bits per byte of two texts are not comparable."""
    by_size: dict[int, str] = {}
    for name, result in results.items():
        size = result.get("made with", {}).get(CORPUS)
        if size is not None:
            by_size.setdefault(size, name)
    if len(by_size) > 1:
        (size, first), (other, second), *_ = by_size.items()
        raise ValueError(
            f"cells of {task.name!r} were trained on different texts: {first} on {size:,} {CORPUS}, {second} on "
            f"{other:,}; the standard library differs between versions of Python, so run all cells with one version"
        )


def _row(name: str, task: Task, cells: list[StudyCell], results: dict[str, Any]) -> Row:
    mine = [cell for cell in cells if cell.contestant.name == name and cell.name in results]
    found = [results[cell.name] for cell in mine]
    row: Row = {"contestant": name, "seeds": [cell.seed for cell in mine]}
    if found:
        row |= {
            "learning_rate": mine[0].learning_rate,
            "parameters": found[0]["parameters"],
            "state_numbers": found[0]["state_numbers"],
            "diverged": sum(result["diverged_at"] is not None for result in found),
            "scores": {test: [result["scores"][test] for result in found] for test in found[0]["scores"]},
            "curves": [result["curve"] for result in found] if task.checkpoints else [],
        }
    return row


def _other_rates(study: Study, task: Task, row: Row, out: Path) -> dict[str, list[float]]:
    """The mean over the tests, seed by seed, at every rate that was not chosen and has all reported seeds."""
    found = {}
    for rate in (task.rates_from or task).rates:
        cells = [cell for cell in study.cells_at(task, rate) if cell.contestant.name == row["contestant"]]
        results = finished(cells, out / study.name)
        if row["seeds"] and rate != row["learning_rate"] and len(results) == task.seeds:
            found[f"{rate:g}"] = [mean_score(results[cell.name]) for cell in cells]
    return found


def seed_means(row: Row) -> list[float]:
    """The mean over the tests, seed by seed."""
    return [statistics.fmean(values) for values in zip(*row["scores"].values())]


def label(row: Row) -> str:
    return CONTESTANTS[row["contestant"]].label


def metric_of(task: dict[str, Any]) -> Metric:
    return Metric(**task["metric"])


def with_interval(metric: Metric, values: list[float]) -> str:
    mean, half = mean_interval(values)
    return metric.shown(mean) if math.isinf(half) else f"{metric.shown(mean)} ± {metric.shown(half)}"


def tables(content: dict[str, Any]) -> list[Table]:
    """A table per task with recorded cells, best mean first."""
    return [task_table(task) for task in content["tasks"] if task["rows"]]


def task_table(task: dict[str, Any]) -> Table:
    metric = metric_of(task)
    tests = list(task["rows"][0]["scores"])
    sign = -1 if metric.higher_is_better else 1
    rows = []
    for row in sorted(task["rows"], key=lambda row: sign * statistics.fmean(seed_means(row))):
        means = seed_means(row)
        rate = f"{row['learning_rate']:g}"
        rate += {0: " (lowest)", len(task["rates"]) - 1: " (highest)"}.get(
            task["rates"].index(row["learning_rate"]), ""
        )
        facts = [label(row), f"{row['state_numbers']:,}", f"{row['parameters']:,}", rate]
        scores = [with_interval(metric, row["scores"][test]) for test in tests] if len(tests) > 1 else []
        rows.append([*facts, *scores, with_interval(metric, means), ", ".join(map(metric.shown, means))])
    for name, scores in task["baselines"].items():
        each = [metric.shown(scores[test]) for test in tests] if len(tests) > 1 else []
        rows.append([name, "–", "–", "–", *each, metric.shown(statistics.fmean(scores.values())), "–"])
    header = ["model", "state", "parameters", "rate", *(tests if len(tests) > 1 else []), "mean", "by seed"]
    return Table(f"{task['name']} ({task['title']}): {metric.name}", header, rows)


def rates_table(content: dict[str, Any]) -> Table:
    """The contestants whose reported seeds also ran at a learning rate that was not chosen."""
    rows = []
    for task in content["tasks"]:
        metric = metric_of(task)
        for row in task["rows"]:
            for rate, means in row["other_rates"].items():
                chosen = f"{row['learning_rate']:g}"
                tuning = [metric.shown(row["tuning"][key]) if key in row["tuning"] else "–" for key in (chosen, rate)]
                each = ", ".join(map(metric.shown, means))
                rows.append(
                    [
                        *(task["name"], label(row)),
                        *(chosen, tuning[0], with_interval(metric, seed_means(row))),
                        *(rate, tuning[1], with_interval(metric, means), each),
                    ]
                )
    header = ["task", "model", "chosen rate", "tuning seeds", "reported seeds"]
    header += ["other rate", "tuning seeds there", "reported seeds there", "by seed there"]
    return Table("", header, rows)


def draw(content: dict[str, Any]) -> Any:
    """A panel per task: every seed a point, the mean with its interval. Tasks with curves also have one over tokens."""
    tasks = [task for task in content["tasks"] if task["rows"]]
    drawn = [(_draw_task, task) for task in tasks]
    drawn += [(_draw_curves, task) for task in tasks if any(row["curves"] for row in task["rows"])]
    columns = min(2, len(drawn))
    lines = -(-len(drawn) // columns)
    tallest = max(len(task["rows"]) for task in tasks)
    beside = 2.8 if len(drawn) > len(tasks) else 0.0  # the legend of the curves
    size = (4.8 * columns + 0.4 + beside, lines * max(2.2, 0.27 * tallest + 1.0) + 0.3)
    fig, axes = figure("", rows=lines, columns=columns, size=size)
    panels = [axes] if len(drawn) == 1 else list(axes.flat)
    for axis, (draw_panel, task) in zip(panels, drawn):
        draw_panel(axis, task)
    for axis in panels[len(drawn) :]:
        axis.set_visible(False)
    if len(drawn) > len(tasks):
        legend_outside(fig, panels[len(tasks)])  # the first task's curves: later tasks have some of its contestants
    return fig


def _draw_task(axis: Any, task: dict[str, Any]) -> None:
    metric = metric_of(task)
    for place, row in enumerate(task["rows"]):
        means = [metric.factor * value for value in seed_means(row)]
        colour = CONTESTANTS[row["contestant"]].colour
        axis.plot(means, [place] * len(means), "o", color=colour, alpha=0.35, markersize=4)
        mean, half = mean_interval(means)
        axis.errorbar(
            [mean], [place], xerr=None if math.isinf(half) else [half], fmt="D", color=colour, capsize=3, markersize=5
        )
    for number, (name, scores) in enumerate(task["baselines"].items()):
        value = metric.factor * statistics.fmean(scores.values())
        axis.axvline(value, color="#999999", linewidth=0.8, linestyle=("--", ":")[number % 2])
        left = value < statistics.fmean(axis.get_xlim())  # the name stands on the side with more room
        beside = {"transform": axis.get_xaxis_transform(), "rotation": 90, "ha": "left" if left else "right"}
        axis.text(value, 0.98, f" {name} ", fontsize=7, color="#777777", va="top", **beside)
    low, high = axis.get_xlim()  # intervals of few seeds reach beyond what a score can be
    axis.set_xlim(max(low, -0.02 * high), min(high, 102.0) if metric.higher_is_better else high)
    axis.set_yticks(range(len(task["rows"])), [label(row) for row in task["rows"]], fontsize=8)
    axis.set_ylim(len(task["rows"]) - 0.5, -0.5)
    arrow = "→ better" if metric.higher_is_better else "← better"
    axis.set(title=task["name"], xlabel=f"{metric.name}  ({arrow})")


def curve_by_seed(row: Row, steps: int) -> dict[int, list[float]]:
    """The mean over the tests, seed by seed, after every recorded number of steps, the last one included."""
    points: dict[int, list[float]] = {steps: seed_means(row)}
    for curve in row["curves"]:
        for point in curve:
            points.setdefault(point["steps"], []).append(statistics.fmean(point["scores"].values()))
    return dict(sorted(points.items()))


def _draw_curves(axis: Any, task: dict[str, Any]) -> None:
    """The first contestant minus every other one over the tokens seen: whether a gap closes."""
    curves = [
        {number: statistics.fmean(values) for number, values in curve_by_seed(row, task["steps"]).items()}
        for row in task["rows"]
    ]
    for row, curve in zip(task["rows"], curves):
        gaps = [curves[0][number] - value for number, value in curve.items()]
        millions = [number * task["batch_tokens"] / 1e6 for number in curve]
        colour = CONTESTANTS[row["contestant"]].colour
        axis.plot(millions, gaps, "o-", color=colour, label=label(row))
    axis.set_yscale("symlog", linthresh=0.05)  # gaps that close and one far model in one panel
    ticks = (-0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
    low, high = axis.get_ylim()
    axis.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    first = label(task["rows"][0])
    better = "above" if metric_of(task).higher_is_better else "below"
    axis.set(title=f"{task['name']}: {first} minus each model", xlabel="million tokens")
    axis.set_ylabel(f"{metric_of(task).name}, logarithmic beyond 0.05\n({better} 0: {first} is ahead)", fontsize=8)

"""The paper's tables from results: one row per model, columns by group, as plain text, Markdown or JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from mdn.common.results import Table
from mdn.evaluation.suites import Column, Job, Suite

MISSING = "–"
Results = dict[Job, dict[str, Any]]


@dataclass(frozen=True)
class SuiteTable:
    """Three header rows (group, title, metric) and a row of numbers per model; None where there is no result."""

    groups: list[str]
    titles: list[str]
    metrics: list[str]
    models: list[str]
    numbers: list[list[float | None]]
    notes: list[str]

    def cells(self) -> list[list[str]]:
        return [[model, *map(_shown, row)] for model, row in zip(self.models, self.numbers)]


def _shown(number: float | None) -> str:
    """Two decimals; an untrained model's perplexity in short."""
    if number is None:
        return MISSING
    return f"{number:.2f}" if abs(number) < 1e5 else f"{number:.2e}"


def make_table(suites: list[Suite], results: dict[str, Results]) -> SuiteTable:
    """``results`` by model label. An average is over the tasks that were run, and a note says so if some were not."""
    groups: list[str] = []
    titles: list[str] = []
    metrics: list[str] = []
    notes: list[str] = []
    numbers: list[list[float | None]] = [[] for _ in results]
    for suite in suites:
        for column in suite.columns:
            groups.append(column.group)
            titles.append(column.title)
            metrics.append(column.shown)
            for row, found in zip(numbers, results.values()):
                row.append(number_of(column, found))
        if suite.average is not None:
            groups.append(suite.columns[-1].group if suite.name != "longbench" else "")
            titles.append("Avg.")
            metrics.append(suite.average)
            for row, label in zip(numbers, results):
                present = [number for number in row[-len(suite.columns) :] if number is not None]
                row.append(statistics.fmean(present) if present else None)
                if len(present) < len(suite.columns):
                    notes.append(f"{label}: {suite.name} Avg. over {len(present)} of {len(suite.columns)} tasks")
    return SuiteTable(groups, titles, metrics, list(results), numbers, notes)


def number_of(column: Column, found: Results) -> float | None:
    result = found.get(column.job)
    if result is None:
        return None
    if column.metric not in result["metrics"]:
        raise ValueError(f"task {column.job.task!r} has no metric {column.metric!r}, only {sorted(result['metrics'])}")
    return result["metrics"][column.metric] * (100 if column.percent else 1)


def columns_of_tasks(jobs: list[Job], results: dict[str, Results]) -> Suite:
    """For `--tasks`: every metric the harness reports, as it is."""
    columns = []
    for job in jobs:
        reported: dict[str, float] = next((found[job]["metrics"] for found in results.values() if job in found), {})
        names = [name for name in reported if not name.endswith("_stderr")]
        columns += [Column(job.name, name, job, name, "", percent=False) for name in names]
    return Suite("tasks", tuple(columns))


def as_text(table: SuiteTable) -> str:
    """Aligned columns; a group's name is above its first column."""
    starts = [
        group if index == 0 or group != table.groups[index - 1] else "" for index, group in enumerate(table.groups)
    ]
    body = [["", *table.titles], ["", *table.metrics], *table.cells()]
    widths = [max(len(row[column]) for row in body) for column in range(len(body[0]))]
    head = " " * widths[0]
    for index, group in enumerate(starts):
        place = widths[0] + sum(widths[1 : index + 1]) + 2 * (index + 1)
        if group and len(head) < place:
            head = head.ljust(place) + group
        elif group:
            head += "  " + group
    lines = [head, *("  ".join(_aligned(row, widths)) for row in body)]
    lines.insert(3, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(line.rstrip() for line in [*lines, *table.notes]) + "\n"


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]


def as_markdown(table: SuiteTable) -> str:
    heads = [
        "Model",
        *(f"{title}<br>{metric}".removesuffix("<br>") for title, metric in zip(table.titles, table.metrics)),
    ]
    groups = " · ".join(f"*{group}*" for group in dict.fromkeys(table.groups) if group)
    rows = [heads, ["---"] + ["---:"] * len(table.titles), *table.cells()]
    lines = [groups, "", *("| " + " | ".join(row) + " |" for row in rows), "", *table.notes]
    return "\n".join(lines).rstrip() + "\n"


def tables(content: dict[str, Any]) -> list[Table]:
    """The table of a file that `mdn eval --json` wrote."""
    found = content["table"]
    header = ["model", *(f"{column['title']} {column['metric']}".strip() for column in found["columns"])]
    rows = [[row["model"], *map(_shown, row["numbers"])] for row in found["rows"]]
    return [Table("; ".join(found["notes"]), header, rows)]


def as_json(table: SuiteTable) -> dict[str, Any]:
    return {
        "columns": [
            {"group": group, "title": title, "metric": metric}
            for group, title, metric in zip(table.groups, table.titles, table.metrics)
        ],
        "rows": [{"model": model, "numbers": row} for model, row in zip(table.models, table.numbers)],
        "notes": table.notes,
    }

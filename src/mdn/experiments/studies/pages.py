"""The generated parts of the study pages, from the recorded cells: `python -m mdn.experiments.studies.pages`.

docs/experiments/data/studies/NAME/cells becomes docs/experiments/data/study_NAME.json, of which `make figures` draws
the figure, and the blocks of the pages between

    <!-- study NAME WHAT -->
    <!-- end of study -->

with WHAT one of: answer, further, figure, comparisons, tables, cost ("all costs" is the table of all studies).
Everything else in a page is written by hand.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mdn.common.files import write_atomically
from mdn.common.results import Table, read_results, write_results
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.overview import summarise_overview
from mdn.experiments.studies.statistics import difference_interval, is_told_apart
from mdn.experiments.studies.study import Comparison, Metric, StudySize
from mdn.experiments.studies.summary import (
    metric_of,
    seed_means,
    summarise,
    tables,
    with_interval,
)

DATA, PAGES = Path("docs/experiments/data"), Path("docs/experiments")
BLOCK = re.compile(r"(<!-- study ([\w-]+) (\w+) -->\n).*?(<!-- end of study -->)", re.DOTALL)
OVERVIEW = "momentum_pays.json"
FIRST, SECOND, LEVEL, UNDECIDED = "first", "second", "level", "undecided"


def summary_path(data: Path, name: str) -> Path:
    return data / f"study_{name.replace('-', '_')}.json"


class Finding(NamedTuple):
    """What the recorded seeds of a task say about a comparison."""

    task: dict[str, Any]
    comparison: Comparison
    first: list[float]
    second: list[float]

    @property
    def metric(self) -> Metric:
        return metric_of(self.task)

    def verdict(self) -> str:
        """FIRST or SECOND if it is better and Welch's interval leaves out zero; UNDECIDED while seeds are missing."""
        if min(len(self.first), len(self.second)) < self.task["seeds"]:
            return UNDECIDED
        if not is_told_apart(self.first, self.second):
            return LEVEL
        difference = difference_interval(self.first, self.second).mean
        return FIRST if self.metric.better(difference, 0.0) else SECOND


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
    """Differences with Welch's 95 % interval."""
    rows = []
    for comparison in STUDIES[content["study"]].comparisons:
        first, second = labels(comparison)
        words = {
            FIRST: f"{first} is better",
            SECOND: f"{second} is better",
            LEVEL: "cannot be told apart",
            UNDECIDED: "seeds are missing",
        }
        for finding in findings(content, comparison):
            metric = finding.metric
            mean, half = difference_interval(finding.first, finding.second)
            gap = metric.shown(mean) if math.isinf(half) else f"{metric.shown(mean)} ± {metric.shown(half)}"
            each = [with_interval(metric, values) for values in (finding.first, finding.second)]
            row = [finding.task["name"], f"{first} and {second}", comparison.what, *each, gap]
            rows.append([*row, words[finding.verdict()]])
    return Table("", ["task", "between", "equal", "first", "second", "difference", "verdict"], rows)


def answer(content: dict[str, Any]) -> str:
    """The first two sentences of what was found, and how much of the study is missing."""
    sentences = _found(content)[:2] or ["No comparison is decided yet."]
    if content["cells"] < content["of"]:
        sentences.append(
            f"{content['cells']} of {content['of']} cells are recorded so far; nothing is concluded beyond them."
        )
    return _paragraph(sentences)


def further(content: dict[str, Any]) -> str:
    """What was found beyond the answer."""
    return _paragraph(_found(content)[2:] or ["Nothing is decided yet."])


def _found(content: dict[str, Any]) -> list[str]:
    """A sentence for all comparisons in a row in which the same is equal."""
    sentences = []
    for equal, group in groupby(STUDIES[content["study"]].comparisons, key=lambda comparison: comparison.equal):
        clauses = [clause for comparison in group for clause in _clauses(content, comparison)]
        if clauses:
            sentences.append(f"With {equal}, {'; '.join(clauses)}.")
    return sentences


def _clauses(content: dict[str, Any], comparison: Comparison) -> list[str]:
    """Who is better on which tasks, a clause per verdict."""
    first, second = labels(comparison)
    words = {
        FIRST: f"{first} is better than {second} on",
        SECOND: f"{second} is better than {first} on",
        LEVEL: f"{first} and {second} cannot be told apart on",
    }
    by_verdict: dict[str, list[str]] = {}
    for finding in findings(content, comparison):
        verdict, pair = finding.verdict(), [finding.first, finding.second]
        better_first = reversed(pair) if verdict == SECOND else pair
        means = " and ".join(finding.metric.shown(statistics.fmean(values)) for values in better_first)
        by_verdict.setdefault(verdict, []).append(f"{finding.task['name']} ({means})")
    return [f"{words[kind]} {', '.join(by_verdict[kind])}" for kind in words if kind in by_verdict]


def _paragraph(sentences: list[str]) -> str:
    return textwrap.fill(" ".join(sentences), 118, break_long_words=False)


def cost(content: dict[str, Any]) -> str:
    minutes, cells = content["processor_minutes"], content["cells"]
    each = f", {60 * minutes / cells:.0f} seconds each on average" if cells else ""
    return f"`mdn study {content['study']}`: {cells} of {content['of']} cells, {minutes:.0f} processor minutes{each}."


def block(content: dict[str, Any], what: str) -> str:
    """The text of one generated block."""
    if what == "answer":
        return answer(content)
    if what == "further":
        return further(content)
    if what == "figure":
        return f"![{content['study']}](../figures/{summary_path(Path(), content['study']).stem}.png)"
    if what == "comparisons":
        table = comparison_table(content)
        return str(table) if table.rows else "No comparison is recorded yet."
    if what == "tables":
        return "\n\n".join(f"**{table.caption}**\n\n{_without_caption(table)}" for table in tables(content))
    if what == "cost":
        return cost(content)
    raise ValueError(
        f"a study page has no generated part {what!r}; expected answer, further, figure, comparisons, tables or cost"
    )


def costs() -> str:
    """How much there is to run, by the tasks' own estimates."""
    sizes = {study.name: study.whole() for study in STUDIES.values()}
    sizes["all"] = StudySize(sum(size.cells for size in sizes.values()), sum(size.seconds for size in sizes.values()))
    rows = [[name, f"{size.cells}", f"{size.seconds / 7200:.1f}"] for name, size in sizes.items()]
    return str(Table("", ["study", "cells", "hours on two quiet cores"], rows))


def _without_caption(table: Table) -> Table:
    return Table("", table.header, table.rows)


def updated(text: str, data: Path) -> str:
    """A page with all its generated blocks as the recorded results have them."""

    def fill(match: re.Match[str]) -> str:
        begin, name, what, end = match.groups()
        if (name, what) == ("all", "costs"):
            return f"{begin}\n{costs()}\n\n{end}"
        path = summary_path(data, name)
        if path.is_file():
            return f"{begin}\n{block(read_results(path, 'study'), what)}\n\n{end}"
        return f"{begin}\nNothing is recorded yet.\n\n{end}" if what == "answer" else f"{begin}{end}"

    return BLOCK.sub(fill, text)


def summaries(data: Path) -> dict[str, dict[str, Any]]:
    """The content of every generated result file, by its name; what has no recorded seed has no file."""
    found = {}
    for study in STUDIES.values():
        content = summarise(study, data / "studies")
        if any(task["rows"] for task in content["tasks"]):
            found[summary_path(data, study.name).name] = {
                "kind": "study",
                "command": f"mdn study {study.name}",
            } | content
    overview = summarise_overview(list(found.values()))
    if overview["rows"]:
        found[OVERVIEW] = overview
    return found


def write_summaries(data: Path, to: Path) -> list[Path]:
    written = []
    for name, content in summaries(data).items():
        write_results(to / name, "momentum-pays" if name == OVERVIEW else "study", content)
        written.append(to / name)
    return written


def main() -> int:
    print(*write_summaries(DATA, DATA), sep="\n")
    for page in (Path("docs/experiments.md"), *sorted(PAGES.glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        if before != updated(before, DATA):
            write_atomically(page, updated(before, DATA).encode())
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

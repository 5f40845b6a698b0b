"""The generated parts of the study pages, from the recorded cells: `python -m mdn.experiments.studies.pages`.

docs/experiments/data/studies/NAME/cells becomes docs/experiments/data/study_NAME.json, of which `make figures` draws
the figure, and the blocks of the pages between

    <!-- study NAME WHAT -->
    <!-- end of study -->

with WHAT one of ``BLOCKS``. "all costs" is the table of all studies, "all overview" the sentences below the README's
figure; the other blocks of ``OTHER_BLOCKS`` are those of pages that have results of another kind.
Everything else in a page is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdn.common.files import write_atomically
from mdn.common.results import Table, read_results, write_results
from mdn.experiments import page_answers
from mdn.experiments.studies import answers, overview
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.findings import comparison_table
from mdn.experiments.studies.study import StudySize
from mdn.experiments.studies.summary import rates_table, summarise, tables

DATA, PAGES = Path("docs/experiments/data"), Path("docs/experiments")
BLOCK = re.compile(r"(<!-- study ([\w-]+) (\w+) -->\n).*?(<!-- end of study -->)", re.DOTALL)
OVERVIEW = "momentum_pays.json"


def summary_path(data: Path, name: str) -> Path:
    return data / f"study_{name.replace('-', '_')}.json"


def cost(content: dict[str, Any]) -> str:
    minutes, cells = content["processor_minutes"], content["cells"]
    each = f", {60 * minutes / cells:.0f} seconds each on average" if cells else ""
    return f"`mdn study {content['study']}`: {cells} of {content['of']} cells, {minutes:.0f} processor minutes{each}."


def figure(content: dict[str, Any]) -> str:
    return f"![{content['study']}](../figures/{summary_path(Path(), content['study']).stem}.png)"


def comparisons(content: dict[str, Any]) -> str:
    table = comparison_table(content)
    return str(table) if table.rows else "No comparison is recorded yet."


def other_rates(content: dict[str, Any]) -> str:
    table = rates_table(content)
    return str(table) if table.rows else "No other learning rate has all of its seeds."


def all_tables(content: dict[str, Any]) -> str:
    return "\n\n".join(f"**{table.caption}**\n\n{Table('', table.header, table.rows)}" for table in tables(content))


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "answer": answers.answer,
    "further": answers.further,
    "claim": answers.claim,
    "best": answers.best,
    "baselines": answers.baselines,
    "figure": figure,
    "comparisons": comparisons,
    "tables": all_tables,
    "rates": other_rates,
    "cost": cost,
}
"""the generated parts of a page: from the summary of a study to the text"""


def block(content: dict[str, Any], what: str) -> str:
    if what not in BLOCKS:
        raise ValueError(f"a study page has no generated part {what!r}; expected one of {', '.join(BLOCKS)}")
    return BLOCKS[what](content)


def costs(data: Path) -> str:
    """How much there is to run by the tasks' own estimates, and what the recorded cells took."""
    rows, total, spent = [], StudySize(0, 0.0), 0.0
    for study in STUDIES.values():
        size, path = study.whole(), summary_path(data, study.name)
        total = StudySize(total.cells + size.cells, total.seconds + size.seconds)
        content = read_results(path, "study") if path.is_file() else {"cells": 0, "processor_minutes": 0.0}
        spent += content["processor_minutes"]
        rows.append([study.name, f"{size.cells}", _hours(size.seconds), f"{content['cells']}"])
        rows[-1].append(_hours(60 * content["processor_minutes"]) if content["cells"] else "–")
    rows.append(
        ["all", f"{total.cells}", _hours(total.seconds), f"{sum(int(row[3]) for row in rows)}", _hours(60 * spent)]
    )
    header = ["study", "cells", "hours on two quiet cores, estimated", "cells recorded", "hours on two cores, measured"]
    return str(Table("", header, rows))


def _hours(seconds: float) -> str:
    """Processor seconds as hours of two cores."""
    return f"{seconds / 7200:.1f}"


def overview_in_words(data: Path) -> str:
    return overview.in_words(read_results(data / OVERVIEW, "momentum-pays"))


OTHER_BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("all", "costs"): costs,
    ("all", "overview"): overview_in_words,
    ("mqar", "answer"): page_answers.mqar_answer,
    ("mqar", "segments"): page_answers.mqar_segments,
    ("mqar", "overwriting"): page_answers.mqar_both,
    ("mqar", "cost"): page_answers.mqar_cost,
    ("ablations", "answer"): page_answers.ablation_answer,
    ("ablations", "gap"): page_answers.ablation_gap,
    ("ablations", "cost"): page_answers.ablation_cost,
    ("dynamics", "spectra"): page_answers.closed_form,
    ("dynamics", "end"): page_answers.right_half_plane,
}
"""generated from the folder of recorded results, not from the summary of one study"""


def updated(text: str, data: Path) -> str:
    """A page with all its generated blocks as the recorded results have them."""

    def fill(match: re.Match[str]) -> str:
        begin, name, what, end = match.groups()
        if (name, what) in OTHER_BLOCKS:
            return f"{begin}\n{OTHER_BLOCKS[name, what](data)}\n\n{end}"
        path = summary_path(data, name)
        if path.is_file():
            return f"{begin}\n{block(read_results(path, 'study'), what)}\n\n{end}"
        nothing = {
            "answer": f"Nothing is recorded yet. `mdn study {name}` runs the study.",
            "claim": "Whether this is so here is open: nothing is recorded yet.",
        }
        return f"{begin}\n{nothing[what]}\n\n{end}" if what in nothing else f"{begin}{end}"

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
    together = overview.summarise_overview(list(found.values()))
    if together["rows"]:
        found[OVERVIEW] = together
    return found


def write_summaries(data: Path, to: Path) -> list[Path]:
    written = []
    for name, content in summaries(data).items():
        write_results(to / name, "momentum-pays" if name == OVERVIEW else "study", content)
        written.append(to / name)
    return written


def main() -> int:
    print(*write_summaries(DATA, DATA), sep="\n")
    for page in (Path("README.md"), Path("docs/experiments.md"), *sorted(PAGES.glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        if before != updated(before, DATA):
            write_atomically(page, updated(before, DATA).encode())
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

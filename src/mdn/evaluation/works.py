"""`mdn eval` without the command line: works for several models; missing data is named before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.common.progress import progress
from mdn.evaluation.definitions import definition_of
from mdn.evaluation.harness import Settings, Subject, TaskSource, evaluate, result_path
from mdn.evaluation.local_data import MissingData
from mdn.evaluation.ruler import adapted_ruler
from mdn.evaluation.suites import Suite, Work
from mdn.evaluation.tables import Results


@dataclass(frozen=True)
class Outcome:
    """``results`` by model label; ``skipped`` says which tasks were left out, and why."""

    results: dict[str, Results]
    skipped: list[str]


def works_of(suites: Iterable[Suite]) -> list[Work]:
    """What the columns need, each once, in order."""
    return list(dict.fromkeys(column.work for suite in suites for column in suite.columns))


def refuse_missing_files(works: list[Work], data: tuple[Path, ...]) -> None:
    """A MissingData that names every task whose local file is not there; no model and no library is needed for it."""
    source, missing = TaskSource(data), []
    for work in works:
        definition_of(work.task)
        try:
            source.local_file(work)
        except MissingData as error:
            missing.append(str(error))
    _refuse(missing)


def _refuse(missing: list[str]) -> None:
    if missing:
        raise MissingData(f"missing data (--skip-missing leaves these tasks out): {'; '.join(missing)}")


def run_works(
    works: list[Work],
    subjects: list[Subject],
    settings: Settings,
    *,
    skip_missing: bool = False,
    haystack: str | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Every work for every model. Without ``skip_missing`` missing data is an error before the first evaluation."""
    source = TaskSource(settings.data)
    for work in works:
        definition_of(work.task)
    needles = any(work.needle_length is not None for work in works)
    with adapted_ruler(haystack, settings.limit) if needles else nullcontext():
        tasks, skipped = _load_all(works, source, subjects[0].source, skip_missing)
        for line in skipped:
            say(f"skipped: {line}")
        results: dict[str, Results] = {subject.label: {} for subject in subjects}
        todo = [(subject, work) for subject in subjects for work in works if work in tasks]
        for subject, work in progress(todo, desc="tasks", unit="task"):
            task = tasks[work]
            if work.needle_length is not None and subject is not subjects[0]:
                task = source.load(work, subject.source)  # haystacks are measured with each model's own tokenizer
            path = result_path(subject, work, settings, source.local_file(work))
            results[subject.label][work] = evaluate(subject, work, task, settings, path)
    return Outcome(results, skipped)


def _load_all(
    works: list[Work], source: TaskSource, tokenizer: str, skip_missing: bool
) -> tuple[dict[Work, Any], list[str]]:
    tasks: dict[Work, Any] = {}
    missing: list[str] = []
    for work in works:
        try:
            tasks[work] = source.load(work, tokenizer)
        except MissingData as error:
            missing.append(str(error))
    if not skip_missing:
        _refuse(missing)
    if not tasks:
        raise MissingData(f"no task is left to run: {'; '.join(missing)}")
    return tasks, missing

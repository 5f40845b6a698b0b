"""`mdn eval` without the command line: all jobs for several models; missing data is reported before anything runs."""

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
from mdn.evaluation.suites import Job, Suite
from mdn.evaluation.tables import Results


@dataclass(frozen=True)
class Outcome:
    """``results`` by model label; ``skipped`` says which tasks were left out, and why."""

    results: dict[str, Results]
    skipped: list[str]


def jobs_of(suites: Iterable[Suite]) -> list[Job]:
    """What the columns need, each once, in order."""
    return list(dict.fromkeys(column.job for suite in suites for column in suite.columns))


def refuse_missing_files(jobs: list[Job], data: tuple[Path, ...]) -> None:
    """Raises a MissingData that names every task whose local file is missing; loads neither model nor harness."""
    source, missing = TaskSource(data), []
    for job in jobs:
        definition_of(job.task)
        try:
            source.local_file(job)
        except MissingData as error:
            missing.append(str(error))
    _refuse(missing)


def _refuse(missing: list[str]) -> None:
    if missing:
        raise MissingData(f"missing data (--skip-missing leaves these tasks out): {'; '.join(missing)}")


def run_jobs(
    jobs: list[Job],
    subjects: list[Subject],
    settings: Settings,
    *,
    skip_missing: bool = False,
    haystack: str | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Runs every job for every model. Without ``skip_missing`` missing data is an error before the first evaluation."""
    source = TaskSource(settings.data)
    for job in jobs:
        definition_of(job.task)
    needles = any(job.needle_length is not None for job in jobs)
    with adapted_ruler(haystack, settings.limit) if needles else nullcontext():
        tasks, skipped = _load_all(jobs, source, subjects[0].source, skip_missing)
        for line in skipped:
            say(f"skipped: {line}")
        results: dict[str, Results] = {subject.label: {} for subject in subjects}
        todo = [(subject, job) for subject in subjects for job in jobs if job in tasks]
        for subject, job in progress(todo, desc="tasks", unit="task"):
            task = tasks[job]
            if job.needle_length is not None and subject is not subjects[0]:
                task = source.load(job, subject.source)  # haystacks are measured with each model's own tokenizer
            path = result_path(subject, job, settings, source.local_file(job))
            results[subject.label][job] = evaluate(subject, job, task, settings, path)
    return Outcome(results, skipped)


def _load_all(
    jobs: list[Job], source: TaskSource, tokenizer: str, skip_missing: bool
) -> tuple[dict[Job, Any], list[str]]:
    tasks: dict[Job, Any] = {}
    missing: list[str] = []
    for job in jobs:
        try:
            tasks[job] = source.load(job, tokenizer)
        except MissingData as error:
            missing.append(str(error))
    if not skip_missing:
        _refuse(missing)
    if not tasks:
        raise MissingData(f"no task is left to run: {'; '.join(missing)}")
    return tasks, missing

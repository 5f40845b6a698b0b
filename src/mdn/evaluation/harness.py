"""Run tasks through lm-evaluation-harness, one result file per model and task; finished ones are reused.

    OUT/<model>-<hash>/<task>-<settings>.json       finished
    OUT/<model>-<hash>/<task>-<settings>.partial*   answers so far; removed when the task is finished

The settings in the name are a hash of everything that decides the numbers (limit, lengths, data, seed, harness), so
other settings never overwrite a result. The batch size is not among them: it does not change a score.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mdn.common.files import read_json, write_atomically
from mdn.common.loading import start_token
from mdn.common.results import model_hash, provenance
from mdn.evaluation.definitions import TASKS_FOLDER, definition_of
from mdn.evaluation.local_data import LocalFile, MissingData, find_local_file, write_local_task
from mdn.evaluation.suites import Job


@dataclass
class Subject:
    """A model to evaluate. ``source`` is where its tokenizer can be loaded from (RULER measures lengths with it)."""

    label: str
    source: str
    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        self.hash = model_hash(self.model, self.tokenizer)

    def facts(self) -> dict[str, Any]:
        facts = {"label": self.label, "source": self.source, "sha256": self.hash}
        return facts | {"parameters": self.model.num_parameters()}


@dataclass(frozen=True)
class Settings:
    out: Path
    data: tuple[Path, ...] = ()
    limit: int | None = None
    batch_size: int = 8
    seed: int = 0
    haystack: str | None = None
    """fingerprint of the text that replaces RULER's essays, if one does"""


class TaskSource:
    """Loads tasks: from local files if folders are given, else from the Hub; our definitions beside the built-in."""

    def __init__(self, data: tuple[Path, ...] = ()) -> None:
        self.data = data

    def local_file(self, job: Job) -> LocalFile | None:
        """The file a task will read; None where it reads none (the Hub, or a generator)."""
        return find_local_file(job.task, self.data) if self.data and job.needle_length is None else None

    def load(self, job: Job, tokenizer: str) -> Any:
        """The harness's Task; raises MissingData if its data is not available."""
        definition = definition_of(job.task)
        file = self.local_file(job)
        metadata: Any = None
        if job.needle_length is not None:
            metadata = {"tokenizer": tokenizer, "max_seq_lengths": [job.needle_length]}
        try:
            if file is None:
                return _load(job.task, definition.parent, metadata)
            with tempfile.TemporaryDirectory() as folder:
                write_local_task(job.task, definition, file, Path(folder))
                return _load(job.task, Path(folder), metadata)
        except (OSError, LookupError, ImportError, ValueError) as error:
            raise MissingData(f"{job.task}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _load(task: str, folder: Path, metadata: Any) -> Any:
    """The task among the definitions in a folder."""
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    return manager.load([task])["tasks"][task]


def result_path(subject: Subject, job: Job, settings: Settings, file: LocalFile | None) -> Path:
    decides = {
        "max_length": job.max_length,
        "needle_length": job.needle_length,
        "limit": settings.limit,
        "seed": settings.seed,
        "data": None if file is None else file.fingerprint(),
        "haystack": settings.haystack if job.needle_length is not None else None,
        "lm_eval": version("lm_eval"),
    }
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]
    label = subject.label.strip("/").replace("/", "_")
    return settings.out / f"{label}-{subject.hash[:8]}" / f"{job.name}-{key}.json"


def evaluate(subject: Subject, job: Job, task: Any, settings: Settings, path: Path) -> dict[str, Any]:
    """The result of one task: read from its file if there is one, else computed and written."""
    if path.is_file():
        return read_json(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    partial = path.with_suffix(".partial")
    with redirect_stdout(sys.stderr):  # the harness prints notes among its results
        found = _simple_evaluate(subject, job, task, settings, partial)
    assert found is not None
    result = {
        "task": job.task,
        "max_length": job.max_length,
        "needle_length": job.needle_length,
        "model": subject.facts(),
        "metrics": _metrics(found["results"][job.task]),
        "examples": found["n-samples"][job.task]["effective"],
        "limit": settings.limit,
        "batch_size": settings.batch_size,
        "data": found["configs"][job.task].get("dataset_kwargs") or found["configs"][job.task].get("dataset_path"),
        "task_version": found["versions"].get(job.task),
        "seconds": round(time.perf_counter() - begin, 1),
        "provenance": provenance(settings.seed),
    }
    write_atomically(path, (json.dumps(result, indent=1, default=str) + "\n").encode())
    for leftover in path.parent.glob(f"{partial.name}*"):
        leftover.unlink()
    return result


def _simple_evaluate(subject: Subject, job: Job, task: Any, settings: Settings, partial: Path) -> Any:
    return lm_eval.simple_evaluate(
        model=_harness_model(subject, job, settings),
        tasks=[task],
        # Without one the harness reads all of its definitions again.
        task_manager=TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False),
        limit=settings.limit,
        use_cache=str(partial),
        log_samples=False,
        bootstrap_iters=1000,
        random_seed=settings.seed,
        numpy_random_seed=settings.seed,
        torch_random_seed=settings.seed,
        fewshot_random_seed=settings.seed,
    )


def _harness_model(subject: Subject, job: Job, settings: Settings) -> HFLM:
    return HFLM(
        pretrained=subject.model,
        tokenizer=subject.tokenizer,
        batch_size=settings.batch_size,
        max_length=job.max_length,
        prefix_token_id=start_token(subject.model, subject.tokenizer),
    )


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    """By metric, without the name of the filter; of several filters the first. Errors end in "_stderr"."""
    metrics: dict[str, float] = {}
    for key, value in found.items():
        name, separator, _ = key.partition(",")
        if separator and isinstance(value, int | float):
            metrics.setdefault(name, float(value))
    return metrics

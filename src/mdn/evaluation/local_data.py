"""Built-in task definitions on local files: for every task a small YAML that includes the installed one and points at
the file instead of the Hub.

A file is found by the task's name (`arc_easy.jsonl`, also `.json` and `.parquet`), or by one of the names below. Its
rows have the fields of the Hub dataset.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mdn.evaluation.definitions import TASKS_FOLDER

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# fda and its like are classes in the harness; on local files the same protocol is a configuration.
_CLASS_TASKS = ("fda", "swde", "squad_completion")


@dataclass(frozen=True)
class FileForm:
    """A known file whose name is not the task's; ``overrides`` are for rows with other fields than the Hub's."""

    stem: str
    overrides: dict[str, Any] = field(default_factory=dict)


KNOWN_FILES: dict[str, tuple[FileForm, ...]] = {
    "lambada_openai": (FileForm("lambada_test"),),
    "wikitext": (FileForm("wikitext2_raw_test_pages"),),
    "arc_easy": (FileForm("arc_easy_test"),),
    "arc_challenge": (FileForm("arc_challenge_test"),),
    "piqa": (FileForm("piqa_validation"),),
    "winogrande": (FileForm("winogrande_validation"),),
    "boolq": (FileForm("boolq_validation"),),
    "nq_open": (FileForm("NQ-open.dev"),),
    "squad_completion": (FileForm("xquad_en_contains"),),
    "triviaqa": (FileForm("triviaqa_nocontext_3000", {"doc_to_text": "{{context}}", "doc_to_target": "{{aliases}}"}),),
}


class MissingData(ValueError):
    """The data of a task is missing; the text says what was looked for."""


@dataclass(frozen=True)
class LocalFile:
    path: Path
    overrides: dict[str, Any]

    def fingerprint(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def find_local_file(task: str, folders: tuple[Path, ...]) -> LocalFile:
    """The file of a task in the first folder that has one."""
    forms = (FileForm(task), *KNOWN_FILES.get(task, ()))
    for folder in folders:
        for form in forms:
            for suffix in FORMATS:
                path = folder / (form.stem + suffix)
                if path.is_file():
                    return LocalFile(path, form.overrides)
    names = " or ".join(f"{form.stem}.jsonl" for form in forms)
    raise MissingData(f"{task}: no {names} in {', '.join(map(str, folders))}")


def write_local_task(task: str, installed: Path, file: LocalFile, folder: Path) -> Path:
    """``folder/<task>.yaml``: the installed (or, for class tasks, our own) definition on the local file."""
    if task in _CLASS_TASKS:
        installed = TASKS_FOLDER / "_completion.yaml"
    content: dict[str, Any] = {
        "include": str(installed),
        "task": task,
        "dataset_path": FORMATS[file.path.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file.path.resolve())}},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
        "num_fewshot": 0,
        **file.overrides,
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return path

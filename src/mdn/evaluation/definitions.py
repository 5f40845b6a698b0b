"""Where tasks are defined: the YAML files of the installed harness, and ours.

The harness's own index parses thousands of files, which takes many seconds; here only their `task:` line is read. The
index is searched only for names that are not tasks: groups and tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks

from mdn.common.errors import nearest

TASKS_FOLDER = Path(__file__).resolve().parent / "tasks"
_TASK = re.compile(r"^[\"']?task[\"']?:[ \t]*[\"']?([\w.:()-]+)[\"']?[ \t]*$", re.MULTILINE)


@cache
def definitions() -> dict[str, Path]:
    """The YAML file of every task by name; ours come first."""
    installed = Path(str(lm_eval.tasks.__file__)).parent
    found: dict[str, Path] = {}
    for path in [*sorted(TASKS_FOLDER.glob("*.yaml")), *sorted(installed.rglob("*.yaml"))]:
        match = _TASK.search(path.read_text(encoding="utf-8", errors="replace"))
        if match is not None:
            found.setdefault(match[1], path)
    return found


def definition_of(task: str) -> Path:
    known = definitions()
    if task not in known:
        raise ValueError(f"unknown task {task!r}{nearest(task, known)}")
    return known[task]


def tasks_named(name: str) -> list[str]:
    """The task of that name, or all tasks of the harness's group or tag of that name."""
    if name in definitions():
        return [name]
    entry = _index().get(name)
    if entry is None:
        raise ValueError(f"unknown task {name!r}{nearest(name, definitions())}")
    members = (entry.cfg or {}).get("task") or sorted(entry.tags)
    members = [members] if isinstance(members, str) else members
    names = [member if isinstance(member, str) else member["task"] for member in members]
    return [task for member in names if member != name for task in tasks_named(member)]


@cache
def _index() -> Mapping[str, Any]:
    return lm_eval.tasks.TaskManager().task_index

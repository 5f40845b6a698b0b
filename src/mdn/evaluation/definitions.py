"""Where tasks are defined: the YAML files of the installed harness, and ours.

The harness's own index parses thousands of files, which takes many seconds; here only their `task:` line is read.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import lm_eval.tasks

from mdn.training.recipe import nearest

TASKS_FOLDER = Path(__file__).resolve().parent / "tasks"
_TASK = re.compile(r"^task:[ \t]*[\"']?([\w.:-]+)[\"']?[ \t]*$", re.MULTILINE)


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
        raise ValueError(f"unknown task {task!r}{nearest(task, known)} (of a group, name the tasks one by one)")
    return known[task]

"""Checkpoints that are whole or not there.

A checkpoint is written below `.saving/`, gets a COMPLETE marker that lists its files and what made it, and is then
renamed to `checkpoint-<step>`. A kill at any moment leaves either the whole directory or something below `.saving/`,
which the next start removes. So a `checkpoint-*` without a fitting marker was damaged or comes from elsewhere, and is
refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.common.files import sync_directory, write_atomically

MARKER = "COMPLETE"
PREFIX = "checkpoint-"
STAGING = ".saving"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    facts: dict[str, Any]
    """what made it: `identity` (the recipe's decisive fields), `sharded`, `world_size`"""


def publish(staged: Path, run_dir: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Mark a fully written directory as complete and give it its final name."""
    files = {str(p.relative_to(staged)): p.stat().st_size for p in sorted(staged.rglob("*")) if p.is_file()}
    for name in files:
        with (staged / name).open("rb") as file:
            os.fsync(file.fileno())
    marker = {"format": FORMAT, "step": step, **facts, "files": files}
    write_atomically(staged / MARKER, json.dumps(marker, indent=1, default=str).encode())
    target = run_dir / f"{PREFIX}{step}"
    if target.exists():  # the same step was saved before; that one is whole, and stays until this one can replace it
        remove(target)
    os.replace(staged, target)
    sync_directory(run_dir)
    return target


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that a kill half way leaves nothing that looks like one."""
    doomed = checkpoint.parent / STAGING / f"removing-{checkpoint.name}"
    doomed.parent.mkdir(exist_ok=True)
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_staging(run_dir: Path) -> None:
    shutil.rmtree(run_dir / STAGING, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """Check one checkpoint against its marker; a ValueError names it and says what is wrong."""
    advice = "move it out of the run's directory or give another `output`"
    try:
        marker = json.loads((path / MARKER).read_text())
        step, files = int(marker["step"]), dict(marker["files"])
    except FileNotFoundError:
        raise ValueError(
            f"{path} has no {MARKER} marker: it is torn or was not written by mdn train; {advice}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MARKER} cannot be read ({error}): the checkpoint is damaged; {advice}") from None
    for name, size in files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise ValueError(f"{path} is torn: {name} {found}; {advice}")
    return Checkpoint(path, step, {k: v for k, v in marker.items() if k not in ("files", "step", "format")})


def step_of(path: Path) -> int:
    number = path.name.removeprefix(PREFIX)
    if not number.isdigit():
        raise ValueError(f"{path} is not a checkpoint: expected {PREFIX}<step>")
    return int(number)


def all_paths(run_dir: Path) -> list[Path]:
    return sorted((p for p in run_dir.glob(f"{PREFIX}*") if p.is_dir()), key=step_of)


def latest(run_dir: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The newest checkpoint, verified to be whole and to come from this recipe; None in a new run."""
    checkpoints = [read(path) for path in all_paths(run_dir)]
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    refuse_foreign(newest, identity)
    return newest


def refuse_foreign(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """A ValueError that names the checkpoint and the fields in which its recipe differs from this one."""
    theirs = checkpoint.facts.get("identity", {})
    ours = json.loads(json.dumps(identity, default=str))
    keys = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k))
    if keys:
        differences = ", ".join(f"{key} was {theirs.get(key)!r} and is {ours.get(key)!r}" for key in keys[:4])
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        raise ValueError(
            f"{checkpoint.path} comes from another recipe ({differences}{more}); "
            "give another `output`, or remove the directory to start anew"
        )


def rotate(run_dir: Path, keep: int) -> None:
    for path in all_paths(run_dir)[:-keep]:
        remove(path)

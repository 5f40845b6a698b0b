"""Checkpoints that are complete or absent.

A checkpoint is written below `.saving/`, gets a COMPLETE marker that lists its files with their SHA-256 and what made
it, and is then renamed to `checkpoint-<step>`. A kill at any moment leaves either the complete directory or something
below `.saving/`, which the next start removes. So a `checkpoint-*` that does not fit its marker was damaged later or
comes from elsewhere: the newest intact one is used instead, and the damaged one is named and set aside.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.common.files import read_json, sha256_of, share, sync_directory, write_atomically

MARKER = "COMPLETE"
PREFIX = "checkpoint-"
STAGING = ".saving"
FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    facts: dict[str, Any]
    """what made it: `identity` (the recipe's decisive fields), `sharded`, `world_size`"""


def publish(staged: Path, run_dir: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Mark a fully written directory as complete and give it its final name."""
    share(staged)
    files = {}
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        with path.open("rb+") as file:  # Windows synchronises only what is open for writing
            os.fsync(file.fileno())
        files[path.relative_to(staged).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    marker = {"format": FORMAT, "step": step, **facts, "files": files}
    write_atomically(staged / MARKER, json.dumps(marker, indent=1, default=str).encode())
    target = run_dir / f"{PREFIX}{step}"
    if target.exists():  # the same step was saved before; that one is intact, and stays until this one can replace it
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
    """Check one checkpoint against its marker, byte for byte; a ValueError names it and says what is wrong."""
    try:
        marker = read_json(path / MARKER)
        step, files = int(marker["step"]), dict(marker["files"])
    except FileNotFoundError:
        raise ValueError(f"{path} has no {MARKER} marker: it is torn or was not written by mdn train") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MARKER} cannot be read ({error}): the checkpoint is damaged") from None
    for name, facts in files.items():
        file = path / name
        size, digest = (facts["bytes"], facts["sha256"]) if isinstance(facts, dict) else (facts, None)
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise ValueError(f"{path} is torn: {name} {found}")
        if digest is not None and sha256_of(file) != digest:
            raise ValueError(f"{path} is damaged: the content of {name} has changed since it was written")
    return Checkpoint(path, step, {k: v for k, v in marker.items() if k not in ("files", "step", "format")})


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def all_paths(run_dir: Path) -> list[Path]:
    found = (path for path in run_dir.glob(f"{PREFIX}*") if path.is_dir())
    return sorted((path for path in found if path.name.removeprefix(PREFIX).isdigit()), key=step_of)


def latest(run_dir: Path, identity: Mapping[str, Any]) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest intact checkpoint of this recipe (None in a new run), and the damaged ones after it with reasons.

    Older checkpoints are not looked at: nothing depends on them.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(all_paths(run_dir)):
        try:
            checkpoint = read(path)
        except ValueError as error:
            damaged[path] = str(error)
            continue
        refuse_foreign(checkpoint, identity)
        return checkpoint, damaged
    if damaged:
        raise ValueError(
            f"no checkpoint in {run_dir} is intact: {'; '.join(damaged.values())}; move them out of the run's "
            "directory to start anew, or give another `output`"
        )
    return None, {}


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it neither blocks its successor nor counts as one; nothing is deleted."""
    target = path.with_name(f"damaged-{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"damaged-{path.name}-{number}")
    os.replace(path, target)
    return target


def refuse_foreign(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """A ValueError that names the checkpoint and the fields in which its recipe differs from this one.

    More steps are not a difference: a run can be lengthened.
    """
    theirs = checkpoint.facts.get("identity", {})
    ours = json.loads(json.dumps(identity, default=str))
    keys = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k))
    if keys == ["training.steps"]:
        if ours["training.steps"] > theirs["training.steps"]:
            return
        raise ValueError(
            f"{checkpoint.path} belongs to a run of {theirs['training.steps']} steps; a run can be lengthened but not "
            f"shortened to training.steps={ours['training.steps']}; give another `output`"
        )
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

"""Resumable grids: a finished cell is a file, and is read instead of run again.

    results = run_grid(cells, job, out, processes=2, label="ablations")      # by name, in the order of the cells

OUT/cells/NAME.json holds the result of a cell and the settings that decided it; a file with other settings is refused,
never overwritten. Cells run over processes of one thread each. Interrupting a grid loses only the cells that are
running, and two processes may work on one grid: a lock per cell makes the second one wait and read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mdn.common.files import exclusive_lock
from mdn.common.progress import progress
from mdn.common.results import plain, read_results, write_results
from mdn.common.workers import completed


class GridCell(Protocol):
    """One training run of a grid."""

    @property
    def name(self) -> str:
        """Unique in its grid, and safe as a file name."""
        ...

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result."""
        ...


@dataclass(frozen=True)
class TimeLimit:
    """Lets a cell begin only if it should be done by ``ends`` (``time.time()``); running cells are never cut short."""

    ends: float

    def allows(self, cell: GridCell) -> bool:
        return time.time() + getattr(cell, "expected_seconds", 0.0) <= self.ends


AnyCell = TypeVar("AnyCell", bound=GridCell)
Job = Callable[[AnyCell], dict[str, Any]]


def cell_path(out: Path, cell: GridCell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def finished(cells: Sequence[GridCell], out: Path) -> dict[str, dict[str, Any]]:
    """Results that are on disk, by the cell's name."""
    return {cell.name: _read(cell, out) for cell in cells if cell_path(out, cell).is_file()}


def run_grid(
    cells: Sequence[AnyCell],
    job: Job[AnyCell],
    out: Path,
    processes: int,
    label: str,
    limit: TimeLimit | None = None,
) -> dict[str, Any]:
    """Results of all cells by name; runs those that are missing (``processes`` = 0: leaves them out).

    Cells that a ``limit`` does not let begin are left out.
    """
    # Finished cells first: one with other settings is refused before hours of training, not after them.
    results = finished(cells, out)
    missing = [(cell,) for cell in cells if cell.name not in results] if processes else []
    with progress(total=len(cells), initial=len(results), desc=label, unit="cell", disable=not missing) as bar:
        work = partial(run_cell, job=job, out=out, limit=limit)
        for name, result in completed(work, missing, processes) if missing else ():
            if result is not None:
                results[name] = result
                bar.set_postfix_str(name, refresh=False)
                bar.update(1)
    return {cell.name: results[cell.name] for cell in cells if cell.name in results}


def run_cell(
    cell: AnyCell, job: Job[AnyCell], out: Path, limit: TimeLimit | None = None
) -> tuple[str, dict[str, Any] | None]:
    """The cell's name and its result: read if it is on disk, else computed and written; None if it may not begin."""
    path = cell_path(out, cell)
    with exclusive_lock(path.with_name(f".{cell.name}.lock")):
        if not path.is_file():
            if limit is not None and not limit.allows(cell):
                return cell.name, None
            write_results(path, "cell", {"settings": cell.settings(), **job(cell)})
        return cell.name, _read(cell, out)


def _read(cell: GridCell, out: Path) -> dict[str, Any]:
    path = cell_path(out, cell)
    try:
        result = read_results(path, "cell")
    except ValueError as error:
        raise ValueError(f"{error}; remove it to run the cell again") from None
    before, now = plain(result["settings"]), json.loads(json.dumps(plain(cell.settings())))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"{path} was made with other settings ({name}: {before.get(name)!r}, now {now.get(name)!r}); "
            "choose another --out"
        )
    return result

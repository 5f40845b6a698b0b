"""Run the cells of an MQAR grid over processes of one thread each; every finished cell is a file, and is not run again.

OUT/recipe.yaml, OUT/cells/<mixer>-d<size>-lr<rate>-seed<seed>.json, and if asked for OUT/models/<the same name>
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from mdn.evaluation.mqar.recipe import Cell, MqarRecipe
from mdn.evaluation.mqar.train import run_cell
from mdn.training.files import write_atomically
from mdn.training.progress import progress


def cell_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def finished(recipe: MqarRecipe, out: Path) -> dict[str, dict[str, Any]]:
    """Results of the grid's cells that are on disk, by name. A file of another recipe is an error, not overwritten."""
    results = {}
    for cell in recipe.cells():
        path = cell_path(out, cell)
        if not path.is_file():
            continue
        try:
            result = json.loads(path.read_text())
        except ValueError:
            raise ValueError(f"{path} is not a result file (not JSON); remove it to run the cell again") from None
        if result.get("identity") != recipe.identity_of(cell):
            raise ValueError(f"{path} is from another recipe than {recipe.name!r} is now; choose another --out")
        results[cell.name] = result
    return results


def run_grid(recipe: MqarRecipe, out: Path, processes: int, save_models: bool = False) -> dict[str, dict[str, Any]]:
    """All results by cell name; runs what is missing. Interrupting it loses only the cells that are running."""
    results = finished(recipe, out)
    out.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)
    write_atomically(out / "recipe.yaml", content.encode())
    missing = [cell for cell in recipe.cells() if cell.name not in results]
    bar = progress(total=len(recipe.cells()), initial=len(results), desc=recipe.name, unit="cell")
    with bar, _pool(min(processes, max(1, len(missing)))) as pool:
        for result in _completed(pool, recipe, missing, out / "models" if save_models else None):
            cell = Cell.model_validate(result["cell"])
            write_atomically(cell_path(out, cell), (json.dumps(result, indent=1) + "\n").encode())
            results[cell.name] = result
            bar.set_postfix_str(f"{cell.name} {mean_accuracy(result):.2f}", refresh=False)
            bar.update(1)
    return results


def mean_accuracy(result: dict[str, Any]) -> float:
    return sum(result["accuracy"].values()) / len(result["accuracy"])


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Spawned workers: forking a process that holds torch's threads is not safe."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_one_thread)
    try:
        yield pool
    except BaseException:
        for worker in list((pool._processes or {}).values()):
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _completed(
    pool: ProcessPoolExecutor, recipe: MqarRecipe, cells: list[Cell], save_to: Path | None
) -> Iterator[dict[str, Any]]:
    running: set[Future[dict[str, Any]]] = {pool.submit(run_cell, recipe, cell, save_to) for cell in cells}
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()

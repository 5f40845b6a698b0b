"""Run the cells of an MQAR grid over processes of one thread each; every finished cell is a file, and is not run again.

OUT/recipe.yaml, OUT/cells/<mixer>-d<size>-lr<rate>-seed<seed>.json, and if asked for OUT/models/<the same name>
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mdn.common.files import write_atomically
from mdn.common.progress import progress
from mdn.common.workers import completed
from mdn.evaluation.mqar.recipe import Cell, MqarRecipe
from mdn.evaluation.mqar.train import run_cell


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
    save_to = out / "models" if save_models else None
    with bar:
        for result in completed(run_cell, [(recipe, cell, save_to) for cell in missing], processes):
            cell = Cell.model_validate(result["cell"])
            write_atomically(cell_path(out, cell), (json.dumps(result, indent=1) + "\n").encode())
            results[cell.name] = result
            bar.set_postfix_str(f"{cell.name} {mean_accuracy(result):.2f}", refresh=False)
            bar.update(1)
    return results


def mean_accuracy(result: dict[str, Any]) -> float:
    return sum(result["accuracy"].values()) / len(result["accuracy"])

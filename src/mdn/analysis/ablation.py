"""`mdn ablate`: the paper's ablation rows at a small scale, one result file per row, seed and arithmetic.

A cell trains a byte-level language model on the Python standard library and notes whether and at which step the loss
or a gradient stopped being finite. Afterwards the growth of products of the trained model's steps on held-out text says
whether its state really grows. Finished cells are read, not repeated; a half-trained one goes on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdn.analysis.ablation_rows import ROWS, SMALL
from mdn.analysis.paper_arithmetic import paper_arithmetic
from mdn.analysis.products import running_growth, shares_over
from mdn.analysis.recording import LayerRecord, record_model
from mdn.common.files import exclusive_lock, write_atomically
from mdn.common.progress import progress
from mdn.common.results import plain
from mdn.common.workers import completed
from mdn.training.dataset import prepare_data
from mdn.training.monitor import NonFiniteError, read_metrics
from mdn.training.recipe import Recipe, validate
from mdn.training.run import train

GROWTH_TOKENS = 2048
EXACT, PAPER = "exact", "paper"
RESULT = "result.json"


@dataclass(frozen=True)
class Scale:
    """How much is trained; part of what makes a finished cell valid."""

    steps: int = 200
    paper_steps: int = 80
    """with the paper's arithmetic, which is slow; its failures come early"""
    batch_tokens: int = 2048
    sequence_length: int = 256
    learning_rate: float = 5e-3
    held_out_bytes: int = 100_000
    text: str | None = None
    """a file or folder to train on; None: the Python standard library"""

    def steps_of(self, arithmetic: str) -> int:
        return self.steps if arithmetic == EXACT else min(self.steps, self.paper_steps)

    def settings(self, arithmetic: str) -> dict[str, Any]:
        """What decides the result of a cell with this arithmetic."""
        return {name: value for name, value in vars(self).items() if name != "paper_steps"} | {
            "steps": self.steps_of(arithmetic),
            "schedule": self.steps,
        }


@dataclass(frozen=True)
class Cell:
    row: str
    seed: int
    arithmetic: str

    def directory(self, out: Path) -> Path:
        words = re.sub(r"[^a-z0-9.]+", "-", self.row.lower()).strip("-")
        return out / f"{words}-{self.arithmetic}-seed{self.seed}"


def cells(rows: list[str], seeds: int, paper_seeds: int) -> list[Cell]:
    """All cells, seed by seed, so that a stopped grid has whole seeds. The paper's form: component rows only."""
    grid = []
    for seed in range(seeds):
        grid += [Cell(row, seed, EXACT) for row in rows]
        if seed < paper_seeds:
            grid += [Cell(row, seed, PAPER) for row in rows if ROWS[row].group == "components"]
    return grid


def recipe_of(cell: Cell, scale: Scale, run_dir: Path) -> Recipe:
    exact = cell.arithmetic == EXACT
    return validate(
        {
            "name": run_dir.name,
            "output": str(run_dir),
            "seed": cell.seed,
            "model": SMALL | ROWS[cell.row].model,
            # Documents follow one another without a reset: the paper's form has no packs, and all rows see the same.
            "data": {
                **({"source": "stdlib"} if scale.text is None else {"source": "files", "paths": [scale.text]}),
                "held_out_bytes": scale.held_out_bytes,
                "reset_at_documents": False,
            },
            "tokenizer": {"kind": "bytes"},
            "training": {
                "batch_tokens": scale.batch_tokens,
                "micro_batch_tokens": scale.batch_tokens,
                "sequence_length": scale.sequence_length,
                "steps": scale.steps_of(cell.arithmetic),
                "learning_rate": scale.learning_rate,
                "warmup_steps": max(scale.steps // 10, 1),
            },
            "logging": {
                "gates_every": max(scale.steps // 10, 1) if exact else 0,  # the probe needs states
                "save_every": 100,
                "keep_checkpoints": 1,
                "tensorboard": False,
            },
        },
        f"ablation {cell.row}",
    )


def run_grid(grid: list[Cell], scale: Scale, out: Path, processes: int) -> list[dict[str, Any]]:
    """The results of the cells, in their order; trains those that are missing (``processes`` = 0: leaves them out)."""
    # Finished cells first: one of another scale is refused before hours of training, not after them.
    results = {cell: run_cell(cell, scale, out) for cell in grid if (cell.directory(out) / RESULT).is_file()}
    missing = [(cell, scale, out) for cell in grid if cell not in results] if processes else []
    with progress(total=len(grid), initial=len(results), desc="ablations", unit="cell", disable=not missing) as bar:
        for result in completed(run_cell, missing, processes) if missing else ():
            cell = Cell(result["row"], result["seed"], result["arithmetic"])
            results[cell] = result
            bar.set_postfix_str(f"{cell.row}, seed {cell.seed}, {cell.arithmetic}", refresh=False)
            bar.update(1)
    return [results[cell] for cell in grid if cell in results]


def run_cell(cell: Cell, scale: Scale, out: Path) -> dict[str, Any]:
    """Train (or go on, or only read) one cell; its result is also in ``result.json`` of its directory.

    Two processes may work on one grid: whoever comes second to a cell waits for it and reads its result.
    """
    run_dir = cell.directory(out)
    with exclusive_lock(out / f".{run_dir.name}.lock"):
        return _run_cell(cell, scale, run_dir)


def _run_cell(cell: Cell, scale: Scale, run_dir: Path) -> dict[str, Any]:
    path = run_dir / RESULT
    settings = scale.settings(cell.arithmetic)
    if path.is_file():
        result = json.loads(path.read_text())
        if result["scale"] == settings:
            return result
        raise ValueError(f"{run_dir} holds a cell of another scale, {result['scale']}; give another --out")
    recipe = recipe_of(cell, scale, run_dir)
    started = time.monotonic()
    result = {"row": cell.row, "seed": cell.seed, "arithmetic": cell.arithmetic, "scale": settings, "diverged": None}
    context = paper_arithmetic() if cell.arithmetic == PAPER else nullcontext()
    try:
        with context:
            outcome = train(recipe)
        if outcome.summary is None:
            raise KeyboardInterrupt
        result |= {"held_out": outcome.summary["held_out"], "parameters": outcome.summary["parameters"]}
    except NonFiniteError as error:
        result |= {"diverged": error.step, "message": str(error)}
    result["seconds"] = time.monotonic() - started
    result |= _dynamics(cell, recipe, run_dir)
    write_atomically(path, (json.dumps(plain(result), indent=1) + "\n").encode())
    return plain(result)


def _dynamics(cell: Cell, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """States during training, and products of steps of the trained model (of the first weights if it diverged)."""
    lines = [entry for line in read_metrics(run_dir / "metrics.jsonl") for entry in line.get("gates", [])]
    largest = max((entry.get("state_rms", 0.0) for entry in lines), default=None)
    if cell.arithmetic == PAPER:
        return {}
    model = _trained_or_fresh(recipe, run_dir)
    data = prepare_data(recipe)
    ids, _ = data.held_out.read(0, min(len(data.held_out), GROWTH_TOKENS))
    growth = [_growth(record) for record in record_model(model, torch.from_numpy(ids).unsqueeze(0))]
    return {
        "largest state rms in training": largest,
        "growth tokens": len(ids),
        "growth": growth,
        "largest log10 growth": max(entry["largest log10 norm"] for entry in growth),
    }


def _growth(record: LayerRecord) -> dict[str, Any]:
    """Of one layer. Keys that are not finite mean that a layer below overflowed on this text: growth without end."""
    if not np.isfinite(record.keys).all():
        return {"layer": record.layer, "largest log10 norm": math.inf, "a layer below overflowed": True}
    return {"layer": record.layer, **shares_over(running_growth(record.gates, record.keys))}


def _trained_or_fresh(recipe: Recipe, run_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import mdn.models  # noqa: F401  (registers the architecture)
    from mdn.training.build import build_model, model_config

    if (run_dir / "model" / "config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype="float32").eval()
    cache = prepare_data(recipe).cache
    return build_model(recipe, model_config(recipe, cache.vocab_size, cache.end_id)).eval()

"""`mdn ablate`: the paper's ablation rows at a small scale, one cell per row, seed and arithmetic.

A cell trains a byte-level language model on the Python standard library and notes whether and at which step the loss
or a gradient stopped being finite. Afterwards the growth of products of the trained model's steps on held-out text says
whether its state really grows. Finished cells are read, not repeated; a half-trained one resumes from its checkpoint.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdn.analysis.products import running_growth, shares_over
from mdn.analysis.recording import LayerRecord, record_model
from mdn.experiments.paper_backend import PAPER_BACKEND, paper_backend
from mdn.training.dataset import prepare_data
from mdn.training.monitor import NonFiniteError, read_metrics
from mdn.training.recipe import Recipe, validate
from mdn.training.run import train

GROWTH_TOKENS = 2048
EXACT, PAPER = "exact", "paper"

# ---------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class AblationRow:
    group: str
    paper: str
    """what the paper reports at 400M parameters"""
    model: dict[str, Any] = field(default_factory=dict)
    """fields of the model's config that differ from the full model"""


SMALL = {
    "mixer": "momentum_deltanet",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "expand_v": 1,
    "intermediate_size": 192,
}
# A ratio of 7:1 needs eight layers; these rows have their own reference of the same depth.
DEEP = {"num_hidden_layers": 8}
ATTENTION = {"num_heads": 4, "rope_theta": 10000.0}
CLAMP = "clamp of log mu"

# The full model clamps log mu at -2, the paper's reported value.
ROWS: dict[str, AblationRow] = {
    "full": AblationRow("components", "trains; Wiki. 31.51, Lamb. 41.62"),
    "no output correction": AblationRow(
        "components", "trains; Wiki. 31.72, Lamb. 42.31", {"use_output_correction": False}
    ),
    "mu = 0": AblationRow("components", "NaN at step 1 (its kernels divide by mu)", {"use_momentum": False}),
    "GDN with bounds": AblationRow(
        "components", "trains; Wiki. 32.11, Lamb. 47.01", {"use_momentum": False, "eta_activation": "one"}
    ),
    "no clamp of log mu": AblationRow("components", "NaN at step 70", {"min_log_mu": None}),
    "alpha_max = 1": AblationRow("components", "NaN at step 1", {"bound_alpha": False}),
    "beta_max = 1": AblationRow("components", "trains; Wiki. 31.52, Lamb. 42.72", {"bound_beta": False}),
    "eta = 2 sigmoid": AblationRow("components", "trains; Wiki. 31.89, Lamb. 49.10", {"eta_activation": "sigmoid"}),
    "log mu >= -1.5": AblationRow(CLAMP, "trains; Wiki. 31.50, Lamb. 42.65", {"min_log_mu": -1.5}),
    "log mu >= -1.357": AblationRow(CLAMP, "trains; Wiki. 31.44, Lamb. 44.90", {"min_log_mu": -1.357}),
    "log mu >= -1": AblationRow(CLAMP, "trains; Wiki. 31.39, Lamb. 43.53", {"min_log_mu": -1.0}),
    "8 layers": AblationRow("hybrids", "(no such row; the reference of the next two)", DEEP),
    "hybrid 3:1": AblationRow(
        "hybrids", "trains; Wiki. 30.09, Lamb. 46.71", DEEP | {"attn": {"layers": [3, 7], **ATTENTION}}
    ),
    "hybrid 7:1": AblationRow(
        "hybrids", "trains; Wiki. 30.32, Lamb. 42.95", DEEP | {"attn": {"layers": [7], **ATTENTION}}
    ),
}


def choose_rows(words: str) -> list[str]:
    """Row names from 'all', a group, or names separated by commas."""
    names = []
    for word in (word.strip() for word in words.split(",")):
        group = [name for name, row in ROWS.items() if row.group == word]
        found = list(ROWS) if word == "all" else group or ([word] if word in ROWS else [])
        if not found:
            groups = sorted({row.group for row in ROWS.values()})
            raise ValueError(
                f"--rows has no row or group {word!r}; groups: all, {', '.join(groups)}; rows: {list(ROWS)}"
            )
        names += [name for name in found if name not in names]
    return names


# --------------------------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class AblationScale:
    """How much is trained."""

    steps: int = 200
    paper_steps: int = 80
    """with the paper's arithmetic, which is slow; its failures come early"""
    batch_tokens: int = 2048
    sequence_length: int = 256
    learning_rate: float = 5e-3
    held_out_bytes: int = 100_000
    text: str | None = None
    """a file or folder to train on; None: the Python standard library"""


@dataclass(frozen=True)
class AblationCell:
    row: str
    seed: int
    arithmetic: str
    scale: AblationScale = AblationScale()

    @property
    def name(self) -> str:
        words = re.sub(r"[^a-z0-9.]+", "-", self.row.lower()).strip("-")
        return f"{words}-{self.arithmetic}-seed{self.seed}"

    @property
    def steps(self) -> int:
        exact = self.arithmetic == EXACT
        return self.scale.steps if exact else min(self.scale.steps, self.scale.paper_steps)

    def settings(self) -> dict[str, Any]:
        scale = {name: value for name, value in vars(self.scale).items() if name != "paper_steps"}
        own = {"row": self.row, "seed": self.seed, "arithmetic": self.arithmetic, "model": ROWS[self.row].model}
        return own | scale | {"steps": self.steps, "schedule": self.scale.steps}

    def recipe(self, out: Path) -> Recipe:
        scale, exact = self.scale, self.arithmetic == EXACT
        return validate(
            {
                "name": self.name,
                "output": str(out / self.name),
                "seed": self.seed,
                "model": SMALL | ROWS[self.row].model | ({} if exact else {"backend": PAPER_BACKEND}),
                # Documents follow one another without a reset: the paper's form has no packs, all rows see the same.
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
                    "steps": self.steps,
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
            f"ablation {self.row}",
        )


def ablation_cells(rows: list[str], seeds: int, paper_seeds: int, scale: AblationScale) -> list[AblationCell]:
    """All cells, seed by seed, so that a stopped grid has whole seeds. The paper's form: component rows only."""
    grid = []
    for seed in range(seeds):
        grid += [AblationCell(row, seed, EXACT, scale) for row in rows]
        if seed < paper_seeds:
            grid += [AblationCell(row, seed, PAPER, scale) for row in rows if ROWS[row].group == "components"]
    return grid


def train_ablation(cell: AblationCell, out: Path) -> dict[str, Any]:
    """Train (or resume) one cell in OUT/NAME, and measure what its state does."""
    recipe = cell.recipe(out)
    started = time.monotonic()
    result: dict[str, Any] = {
        "row": cell.row,
        "seed": cell.seed,
        "arithmetic": cell.arithmetic,
        "steps": cell.steps,
        "diverged": None,
    }
    try:
        with paper_backend() if cell.arithmetic == PAPER else nullcontext():
            outcome = train(recipe)
        if outcome.summary is None:
            raise KeyboardInterrupt
        result |= {"held_out": outcome.summary["held_out"], "parameters": outcome.summary["parameters"]}
    except NonFiniteError as error:
        result |= {"diverged": error.step, "message": str(error)}
    result["seconds"] = time.monotonic() - started
    return result if cell.arithmetic == PAPER else result | _dynamics(recipe, out / cell.name)


def _dynamics(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """States during training, and products of steps of the trained model (of the initial values if it diverged)."""
    lines = [entry for line in read_metrics(run_dir / "metrics.jsonl") for entry in line.get("gates", [])]
    model = _trained_or_fresh(recipe, run_dir)
    held_out = prepare_data(recipe).held_out
    ids, _ = held_out.read(0, min(len(held_out), GROWTH_TOKENS))
    growth = [_growth(record) for record in record_model(model, torch.from_numpy(ids).unsqueeze(0))]
    return {
        "largest state rms in training": max((entry.get("state_rms", 0.0) for entry in lines), default=None),
        "growth tokens": len(ids),
        "growth": growth,
        "largest log10 growth": max(entry["largest log10 norm"] for entry in growth),
    }


def _growth(record: LayerRecord) -> dict[str, Any]:
    """Growth for one layer. Keys that are not finite mean that an earlier layer overflowed on this text: reported as
    infinite."""
    if not np.isfinite(record.keys).all():
        return {"layer": record.layer, "largest log10 norm": math.inf, "an earlier layer overflowed": True}
    return {"layer": record.layer, **shares_over(running_growth(record.gates, record.keys))}


def _trained_or_fresh(recipe: Recipe, run_dir: Path) -> Any:
    from mdn.common.loading import load_model
    from mdn.training.build import build_model, model_config

    if (run_dir / "model" / "config.json").is_file():
        return load_model(str(run_dir / "model"), dtype="float32")
    cache = prepare_data(recipe).cache
    return build_model(recipe, model_config(recipe, cache.vocab_size, cache.end_id)).eval()

"""`mdn analyze causality`: blockwise against stepwise momentum (the paper's Figure 1).

Models are trained with block size 1, 16 and 64, on associative recall with rewriting and on text. Each is then
evaluated as it was trained and stepwise, as decoding works: the difference is what breaking causality costs. The
stepwise evaluation is the exact chunk form; its logits are compared with real decoding, token by token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdn.common.plots import COLOURS, figure, legend_outside
from mdn.common.results import Table
from mdn.experiments.ablation_cells import EXACT, AblationCell, AblationScale
from mdn.experiments.mqar import MqarRecipe, segment_accuracy, train_cell_model
from mdn.layers.momentum_deltanet import MomentumDeltaNet

TASKS = {"rewriting": "accuracy", "text": "bits per byte"}
"""task: its metric"""


@dataclass(frozen=True)
class CausalityCell:
    task: str
    block_size: int
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.task}-block{self.block_size}-seed{self.seed}"

    def settings(self) -> dict[str, Any]:
        return dict(vars(self))


@contextmanager
def block_size_of(model: nn.Module, size: int) -> Iterator[None]:
    """Inside, the model computes its rule with this block size; 1 is stepwise."""
    layers = [module for module in model.modules() if isinstance(module, MomentumDeltaNet)]
    before = [layer.momentum_block_size for layer in layers]
    for layer in layers:
        layer.momentum_block_size = size
    try:
        yield
    finally:
        for layer, held in zip(layers, before):
            layer.momentum_block_size = held


@torch.no_grad()
def decoding_difference(model: nn.Module, input_ids: Tensor) -> float:
    """Largest difference between logits of the stepwise chunk form and of decoding ``input_ids`` token by token."""
    with block_size_of(model, 1):
        together = model(input_ids=input_ids, use_cache=False).logits
        cache, rows = None, []
        for t in range(input_ids.shape[1]):
            out = model(input_ids=input_ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[:, -1])
    return float((torch.stack(rows, dim=1) - together).abs().max())


def train_both_ways(cell: CausalityCell, out: Path) -> dict[str, Any]:
    """Train one cell, evaluate it as trained and stepwise."""
    started = time.monotonic()
    found = _rewriting(cell) if cell.task == "rewriting" else _text(cell, out)
    return {"cell": vars(cell), **found, "seconds": time.monotonic() - started}


def _rewriting_recipe(cell: CausalityCell) -> MqarRecipe:
    """Every key is bound twice and the later value is queried, at the longest training length and at its double."""
    return MqarRecipe.model_validate(
        {
            "name": "causality",
            "task": {"vocab_size": 512, "rewriting": True},
            "train": [{"length": 32, "pairs": 4}, {"length": 64, "pairs": 8}],
            "test": [{"length": 64, "pairs": 8, "examples": 200}, {"length": 128, "pairs": 16, "examples": 200}],
            "model": {
                "num_hidden_layers": 2,
                "num_heads": 4,
                "head_dim": 32,
                "expand_v": 1,
                "use_mlp": False,
                "tie_word_embeddings": True,
            },
            "mixers": {"momentum_deltanet": {"momentum_block_size": cell.block_size}},
            "hidden_sizes": [64],
            "learning_rates": [1e-2],
            "seeds": [cell.seed],
            "training": {"steps": cell.steps, "batch_tokens": 2048},
        }
    )


def _rewriting(cell: CausalityCell) -> dict[str, Any]:
    recipe = _rewriting_recipe(cell)
    (only,) = recipe.cells()
    model, outcome = train_cell_model(only, label=cell.name)
    as_trained = segment_accuracy(model, recipe)
    with block_size_of(model, 1):
        stepwise = segment_accuracy(model, recipe)
    probe = recipe.examples(recipe.test[-1], 2, torch.Generator().manual_seed(7)).inputs
    return {
        "as trained": as_trained,
        "stepwise": stepwise,
        "decoding": decoding_difference(model, probe),
        "diverged_at": outcome.diverged_at,
    }


def _text(cell: CausalityCell, out: Path) -> dict[str, Any]:
    """The full model of the ablations with another block size, on the same text."""
    from mdn.common.loading import load_model
    from mdn.training.dataset import prepare_data
    from mdn.training.evaluate import evaluate
    from mdn.training.run import train

    full = AblationCell("full", cell.seed, EXACT, AblationScale(steps=cell.steps)).recipe(out)
    changes = {"name": cell.name, "output": str(out / cell.name)}
    recipe = full.model_copy(update=changes | {"model": full.model | {"momentum_block_size": cell.block_size}})
    if train(recipe).summary is None:
        raise KeyboardInterrupt
    model = load_model(str(out / cell.name / "model"), dtype="float32")
    data, length = prepare_data(recipe), recipe.training.sequence_length
    found = {}
    for name, size in (("as trained", cell.block_size), ("stepwise", 1)):
        with block_size_of(model, size):
            result = evaluate(model, data.held_out, length, recipe.data.reset_at_documents, show=False)
        found[name] = {f"length {length}": result["bits_per_byte"]}
    ids, _ = data.held_out.read(0, 128)
    return {**found, "decoding": decoding_difference(model, torch.from_numpy(np.ascontiguousarray(ids)).unsqueeze(0))}


# ------------------------------------------------------------------------------------------------- table and figure


def tables(content: dict[str, Any]) -> list[Table]:
    rows = []
    for result in content["results"]:
        cell = result["cell"]
        for name, trained in result["as trained"].items():
            stepwise = result["stepwise"][name]
            facts = [cell["task"], name, str(cell["block_size"]), str(cell["seed"])]
            rows.append([*facts, f"{trained:.3f}", f"{stepwise:.3f}", f"{stepwise - trained:+.3f}"])
    header = ["task", "test", "block", "seed", "as trained", "decoded stepwise", "mismatch"]
    return [Table("trained with blocks, decoded token by token", header, rows)]


def draw(content: dict[str, Any]) -> Any:
    """One panel per task and test: as trained against decoded stepwise, a point per seed."""
    results = content["results"]
    panels = list(dict.fromkeys((r["cell"]["task"], name) for r in results for name in r["as trained"]))
    size = (3.2 * len(panels) + 1.6, 3.8)
    fig, axes = figure("Blockwise training, stepwise decoding", "block size", columns=len(panels), size=size)
    for axis, (task, name) in zip(np.atleast_1d(axes), panels):
        chosen = [r for r in results if r["cell"]["task"] == task and name in r["as trained"]]
        sizes = sorted({r["cell"]["block_size"] for r in chosen})
        for colour, marker, how in ((COLOURS[0], "o", "as trained"), (COLOURS[1], "s", "stepwise")):
            points = [(sizes.index(r["cell"]["block_size"]), r[how][name]) for r in chosen]
            axis.plot([x for x, _ in points], [y for _, y in points], marker, color=colour, alpha=0.6, label=how)
            means = [np.mean([y for x, y in points if x == place]) for place in range(len(sizes))]
            axis.plot(range(len(sizes)), means, color=colour)
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.margins(x=0.15)
        axis.set(title=f"{task}, {name}", xlabel="block size", ylabel=TASKS[task])
    legend_outside(fig, np.atleast_1d(axes)[0])
    return fig

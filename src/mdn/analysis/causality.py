"""`mdn analyze causality`: blockwise against stepwise momentum (the paper's Figure 1).

Models are trained with block size 1, 16 and 64, on associative recall with rewriting and on text. Each is then
evaluated as it was trained and stepwise, as decoding works: the difference is what breaking causality costs. The
stepwise evaluation is the exact chunk form; its logits are compared with real decoding, token by token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.common.files import write_atomically
from mdn.common.plots import COLOURS, figure
from mdn.common.progress import progress
from mdn.common.results import markdown_table, plain
from mdn.evaluation.mqar import train as mqar
from mdn.evaluation.mqar.data import generate
from mdn.evaluation.mqar.recipe import MqarRecipe
from mdn.layers.momentum_deltanet import MomentumDeltaNet
from mdn.models import MomentumDeltaNetForCausalLM

MIXER = "momentum_deltanet"
METRICS = {"rewriting": "accuracy", "text": "bits per byte"}


@dataclass(frozen=True)
class Cell:
    task: str
    block_size: int
    seed: int
    steps: int

    def path(self, out: Path) -> Path:
        return out / f"{self.task}-block{self.block_size}-seed{self.seed}.json"


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


# ------------------------------------------------------------------------------------------------- the rewriting task


def _rewriting_recipe(cell: Cell) -> MqarRecipe:
    """Every key is bound twice, the later value is asked; tested at the longest training length and at its double."""
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
            "mixers": {MIXER: {"momentum_block_size": cell.block_size}},
            "hidden_sizes": [64],
            "learning_rates": [1e-2],
            "seeds": [cell.seed],
            "training": {"steps": cell.steps, "batch_tokens": 2048},
        }
    )


def _train_rewriting(recipe: MqarRecipe, cell: Cell) -> MomentumDeltaNetForCausalLM:
    """The recipe's own cell, but the model is kept: it is evaluated twice."""
    (chosen,) = recipe.cells()
    torch.manual_seed(cell.seed)
    model = MomentumDeltaNetForCausalLM(recipe.config_of(chosen)).train()
    optimizer = mqar.make_optimizer(model, recipe, chosen.learning_rate)
    label = f"rewriting, block {cell.block_size}, seed {cell.seed}"
    examples = mqar.batches(recipe, cell.seed)
    for step, batch in enumerate(progress(examples, total=cell.steps, desc=label, unit="step", leave=False)):
        for group in optimizer.param_groups:
            group["lr"] = chosen.learning_rate * mqar.rate_at(step, cell.steps, recipe.training.warmup)
        loss = F.cross_entropy(mqar.query_logits(model, batch).flatten(0, 1), batch.answers.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip)
        optimizer.step()
    return model.eval()


def _rewriting(cell: Cell, out: Path) -> dict[str, Any]:
    recipe = _rewriting_recipe(cell)
    model = _train_rewriting(recipe, cell)
    as_trained = mqar.test_accuracy(model, recipe)
    with block_size_of(model, 1):
        stepwise = mqar.test_accuracy(model, recipe)
    hardest = recipe.test[-1]
    generator = torch.Generator().manual_seed(7)
    probe = generate(
        2, hardest.length, hardest.pairs, vocab_size=recipe.task.vocab_size, rewriting=True, generator=generator
    )
    return {"as trained": as_trained, "stepwise": stepwise, "decoding": decoding_difference(model, probe.inputs)}


# --------------------------------------------------------------------------------------------------------------- text


def _text(cell: Cell, out: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from mdn.analysis.ablation import Cell as AblationCell
    from mdn.analysis.ablation import Scale, recipe_of
    from mdn.training.dataset import prepare_data
    from mdn.training.evaluate import evaluate
    from mdn.training.run import train

    run_dir = out / f"text-block{cell.block_size}-seed{cell.seed}"
    recipe = recipe_of(AblationCell("full", cell.seed, "exact"), Scale(steps=cell.steps), run_dir)
    recipe = recipe.model_copy(update={"model": recipe.model | {"momentum_block_size": cell.block_size}})
    if train(recipe).summary is None:
        raise KeyboardInterrupt
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype="float32").eval()
    data, length = prepare_data(recipe), recipe.training.sequence_length
    found = {}
    for name, size in (("as trained", cell.block_size), ("stepwise", 1)):
        with block_size_of(model, size):
            result = evaluate(model, data.held_out, length, recipe.data.reset_at_documents, show=False)
        found[name] = {f"length {length}": result["bits_per_byte"]}
    ids, _ = data.held_out.read(0, 128)
    return {**found, "decoding": decoding_difference(model, torch.from_numpy(np.ascontiguousarray(ids)).unsqueeze(0))}


# --------------------------------------------------------------------------------------------------------- everything


def run_cell(cell: Cell, out: Path) -> dict[str, Any]:
    """Train and evaluate one cell, or read its finished result."""
    path = cell.path(out)
    if path.is_file():
        result = json.loads(path.read_text())
        if result["cell"] != plain(vars(cell)):
            raise ValueError(f"{path} holds another cell, {result['cell']}; give another --out")
        return result
    started = time.monotonic()
    found = (_rewriting if cell.task == "rewriting" else _text)(cell, out)
    result = plain({"cell": vars(cell), **found, "seconds": time.monotonic() - started})
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    return result


def table(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        cell = result["cell"]
        for name, trained in result["as trained"].items():
            stepwise = result["stepwise"][name]
            facts = [cell["task"], name, str(cell["block_size"]), str(cell["seed"])]
            rows.append([*facts, f"{trained:.3f}", f"{stepwise:.3f}", f"{stepwise - trained:+.3f}"])
    header = ["task", "test", "block", "seed", "as trained", "decoded stepwise", "mismatch"]
    return markdown_table(header, rows)


def draw(found: dict[str, Any]) -> Any:
    """One panel per task and test: as trained against decoded stepwise, a point per seed."""
    results = found["results"]
    panels = sorted({(r["cell"]["task"], name) for r in results for name in r["as trained"]})
    size = (3.2 * max(len(panels), 2), 3.6)
    fig, axes = figure("Blockwise training, stepwise decoding", "block size", columns=max(len(panels), 2), size=size)
    for axis, (task, name) in zip(axes.flat, panels):
        chosen = [r for r in results if r["cell"]["task"] == task and name in r["as trained"]]
        sizes = sorted({r["cell"]["block_size"] for r in chosen})
        for colour, marker, how in ((COLOURS[0], "o", "as trained"), (COLOURS[1], "s", "stepwise")):
            points = [(sizes.index(r["cell"]["block_size"]), r[how][name]) for r in chosen]
            axis.plot([x for x, _ in points], [y for _, y in points], marker, color=colour, alpha=0.6, label=how)
            means = [np.mean([y for x, y in points if x == place]) for place in range(len(sizes))]
            axis.plot(range(len(sizes)), means, color=colour)
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.set(title=f"{task}, {name}", ylabel=METRICS[task])
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    return fig

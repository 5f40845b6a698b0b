"""What a finished run leaves behind: a loss plot, a gate plot and a model card."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdn.training.monitor import read_metrics
from mdn.training.recipe import Recipe

GATE_PANELS = (
    ("alpha", "forgetting α"),
    ("mu", "momentum decay μ"),
    ("beta", "step size β"),
    ("eta", "momentum input η"),
    ("mu_at_clamp", "share of log μ at the clamp"),
    ("state_rms", "state S, root mean square"),
)


def plot_loss(run_dir: Path, recipe: Recipe, command: str) -> Path | None:
    """loss.png and loss.svg: every step, its running mean, and the held-out evaluations."""
    from mdn.common.plots import count_axis, figure, save_figure

    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return None
    tokens = np.array([line["tokens"] for line in steps], dtype=float)
    losses = np.array([line["loss"] for line in steps], dtype=float)  # null, a skipped step, becomes NaN
    fig, axis = figure(f"{recipe.name}: loss", "tokens", "nats per token")
    axis.plot(tokens, losses, color="#BBBBBB", linewidth=0.7, label="every step")
    width = min(max(len(losses) // 50, 2), len(losses))
    mean = np.convolve(losses, np.ones(width) / width, mode="valid")
    axis.plot(tokens[width - 1 :], mean, label=f"mean of {width} steps")
    held_out = [line for line in lines if "held_out" in line]
    if held_out:
        at = [line["step"] * recipe.training.batch_tokens for line in held_out]
        axis.plot(at, [line["held_out"]["loss"] for line in held_out], "o", label="held-out text")
    count_axis(axis)
    axis.legend()
    return save_figure(fig, run_dir / "loss.png", command)[0]


def plot_gates(run_dir: Path, recipe: Recipe, command: str) -> Path | None:
    """gates.png and gates.svg: mean gates and state norm of every layer over training; None without gates."""
    from mdn.common.plots import figure, save_figure

    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "gates" in line]
    present = [(key, title) for key, title in GATE_PANELS if lines and any(key in v for v in lines[0]["gates"])]
    if not present:
        return None
    columns = 3 if len(present) > 2 else max(len(present), 2)
    rows = -(-len(present) // columns)
    fig, axes = figure(f"{recipe.name}: gates", "step", rows=rows, columns=columns, size=(3.2 * columns, 2.5 * rows))
    panels = axes.flat
    for axis, (key, title) in zip(panels, present):
        for position, first in enumerate(lines[0]["gates"]):
            values = [line["gates"][position].get(key, float("nan")) for line in lines]
            axis.plot([line["step"] for line in lines], values, marker=".", label=f"layer {int(first['layer'])}")
        axis.set_title(title)
    for axis in list(panels)[len(present) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=7)
    return save_figure(fig, run_dir / "gates.png", command)[0]


def model_card(recipe: Recipe, summary: dict[str, Any], command: str) -> str:
    """README.md of the model's directory: what it is, how it was made, how good it is, how to load it."""
    held_out, training = summary["held_out"], recipe.training
    references = "".join(f"| {name} | {bits:.3f} |\n" for name, bits in summary.get("references", {}).items())
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [momentum-deltanet]\n---\n",
        f"# {recipe.name}\n\n{recipe.description}\n",
        f"- mixer: `{summary['mixer']}`, {summary['parameters']:,} parameters",
        f"- trained on {summary['data']}: {summary['tokens']:,} tokens, {summary['steps']:,} steps, seed {recipe.seed}",
        f"- AdamW, peak learning rate {training.learning_rate:g}, {training.batch_tokens:,} tokens a step, "
        f"sequences of {training.sequence_length} tokens, {training.precision}",
        f"- made with: `{command}` (torch {torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.now(UTC):%Y-%m-%d})\n",
        "## Held-out text\n",
        f"{held_out['documents']:,} documents, {held_out['bytes']:,} bytes that were not trained on, read in windows "
        f"of {training.sequence_length} tokens.\n",
        "| | bits per byte |\n|---|---|",
        f"| this model | **{held_out['bits_per_byte']:.3f}** |\n{references}",
        f"Perplexity {held_out['perplexity']:.2f}, {held_out['bytes'] / held_out['tokens']:.2f} bytes a token.\n",
        "## Use\n",
        "The architecture is in the package `momentum-deltanet` (`pip install momentum-deltanet`). PATH is this "
        "directory.\n",
        "```python\nimport mdn.models  # registers the architecture\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("PATH")\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n```\n',
        "or `mdn generate PATH --prompt ...`\n",
    ]
    sample = summary.get("sample")
    if sample:
        parts.append(f"## A completion\n\n```\n{sample.replace('```', '` ` `')}\n```\n")
    parts.append("![loss](loss.png)\n")
    return "\n".join(parts)

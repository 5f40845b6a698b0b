"""`mdn analyze state-norm`: how much the fast weight changes from token to token while decoding.

    change_t = mean over n of |S_t - S_{t-1}|_F        n: the sequences, layers and heads that are averaged (stated)

Any mixer with a matrix state (number 0 of its cache layer, ``[N, H, K, V]``) takes part; attention layers have none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdn.common.plots import COLOURS, MIXER_COLOURS, figure, legend_outside
from mdn.common.progress import progress
from mdn.common.results import Table


def _states(cache: Any) -> dict[int, Tensor]:
    """The matrix state of every recurrent layer, by layer."""
    held = {layer: getattr(entry, "recurrent_states", None) for layer, entry in enumerate(cache.layers)}
    return {layer: states[0] for layer, states in held.items() if states and states.get(0) is not None}


@torch.no_grad()
def change_norms(model: nn.Module, input_ids: Tensor, label: str = "") -> dict[int, dict[str, np.ndarray]]:
    """Decode ``input_ids [N, T]`` token by token. Per layer: ``change`` and ``norm`` of S, each ``[T - 1, N, H]``.

    Entry t - 1 is the step that read token t (the first token makes the state and has no step before it).
    """
    if input_ids.shape[1] < 2:
        raise ValueError(f"input_ids must have at least 2 tokens a row, got {list(input_ids.shape)}")
    cache = model(input_ids=input_ids[:, :1], use_cache=True).past_key_values
    before = {layer: state.clone() for layer, state in _states(cache).items()}
    if not before:
        raise ValueError("the model has no layer with a matrix state: nothing to measure")
    found: dict[int, dict[str, list[Tensor]]] = {layer: {"change": [], "norm": []} for layer in before}
    for t in progress(range(1, input_ids.shape[1]), desc=label, unit="token", leave=False, disable=not label):
        model(input_ids=input_ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        for layer, state in _states(cache).items():
            found[layer]["change"].append(torch.linalg.matrix_norm(state - before[layer]))
            found[layer]["norm"].append(torch.linalg.matrix_norm(state))
            before[layer].copy_(state)
    return {
        layer: {name: torch.stack(rows).double().numpy() for name, rows in entry.items()}
        for layer, entry in found.items()
    }


def summarise(norms: dict[int, dict[str, np.ndarray]]) -> dict[str, Any]:
    """The curve over time (mean over n), and per layer and head the mean over time."""
    first = next(iter(norms.values()))["change"]
    heads = {layer: entry["change"].shape[2] for layer, entry in norms.items()}
    everything = np.concatenate([entry["change"].reshape(len(first), -1) for entry in norms.values()], axis=1)
    return {
        "steps": len(first),
        "sequences": first.shape[1],
        "layers": len(norms),
        "n": everything.shape[1],
        "n is": f"{first.shape[1]} sequences x {len(norms)} layers x heads {sorted(set(heads.values()))}",
        "curve": everything.mean(axis=1),
        "mean change": float(everything.mean()),
        "per layer": [
            {
                "layer": layer,
                "mean change per head": entry["change"].mean(axis=(0, 1)),
                "mean norm per head": entry["norm"].mean(axis=(0, 1)),
                "relative change": float((entry["change"] / np.maximum(entry["norm"], 1e-30)).mean()),
            }
            for layer, entry in norms.items()
        ],
    }


def tables(content: dict[str, Any]) -> list[Table]:
    models, layers = [], []
    for name, entry in content["models"].items():
        n = f"{entry['n']} ({entry['n is']})"
        models.append([name, entry["mixer"], f"{entry['mean change']:.4g}", f"{entry['steps']:,}", n])
        for layer in entry["per layer"]:
            heads = " ".join(f"{value:.3g}" for value in layer["mean change per head"])
            layers.append([name, str(layer["layer"]), heads, f"{layer['relative change']:.3f}"])
    caption = f"mean change of S per decoding step, on {content['text']}"
    return [
        Table(caption, ["model", "mixer", "change", "steps", "n"], models),
        Table("by layer", ["model", "layer", "mean change of S, every head", "change / norm"], layers),
    ]


def draw(content: dict[str, Any]) -> Any:
    """Left: the average change over decoding steps; right: its mean for every layer and head."""
    models = content["models"]
    fig, (left, right) = figure("Change of the fast weight while decoding", columns=2, size=(11.0, 3.8))
    for number, (name, entry) in enumerate(models.items()):
        colour = MIXER_COLOURS.get(entry["mixer"], COLOURS[number % len(COLOURS)])
        curve = np.asarray(entry["curve"])
        width = max(len(curve) // 60, 1)
        smooth = np.convolve(curve, np.ones(width) / width, mode="valid")
        left.plot(np.arange(width, len(curve) + 1), smooth, color=colour, label=f"{name} (n = {entry['n']})")
        heads = [(layer["layer"], value) for layer in entry["per layer"] for value in layer["mean change per head"]]
        offset = (number - (len(models) - 1) / 2) * 0.2
        right.plot([layer + offset for layer, _ in heads], [value for _, value in heads], "o", color=colour)
    smoothed = f", smoothed over {width} steps" if width > 1 else ""
    left.set(title=f"mean over all heads{smoothed}", xlabel="decoding step", ylabel="change of S, Frobenius norm")
    right.set(title="mean over time, every head", xlabel="layer", ylabel="change of S, Frobenius norm")
    right.xaxis.get_major_locator().set_params(integer=True)
    legend_outside(fig, left)
    return fig

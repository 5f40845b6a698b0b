"""`mdn analyze stability`: spectral radius of single steps, growth of products of steps, and where the guarantee ends.

Gates come from the layer's own parameterisation at its initial values (and its ablations), from given ranges, or from a
trained model on a text.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from mdn.analysis.eigenvalues import GUARANTEED_LOG_MU, GateSample, pair_eigenvalues, sample_pair, spectral_radius
from mdn.analysis.products import growth_summary, running_growth, shares_over
from mdn.analysis.recording import LayerRecord, record_layer
from mdn.common.plots import COLOURS, doubling_axis, figure, legend_outside, powers_of_ten
from mdn.common.results import Table
from mdn.layers.momentum_deltanet import MomentumDeltaNet

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no clamp": {"min_log_mu": None},
    "mu = 0": {"use_momentum": False},
    "alpha_max = 1": {"bound_alpha": False},
    "beta_max = 1": {"bound_beta": False},
    "both bounds off": {"bound_alpha": False, "bound_beta": False},
    "eta = 2 sigmoid": {"eta_activation": "sigmoid"},
    "quasi-hyperbolic": {"momentum": "quasi_hyperbolic"},
    "Nesterov": {"momentum": "nesterov"},
}
"""kinds of momentum and ablations of the layer's gates, as the layer's arguments"""
HIDDEN_SIZE = 64
KEY_DIM = 16


def initial_record(variant: str, heads: int, steps: int, seed: int) -> LayerRecord:
    """Gates and keys of a fresh layer (one variant) on normally distributed hidden states."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {sorted(VARIANTS)}, got {variant!r}")
    torch.manual_seed(seed)
    layer = MomentumDeltaNet(HIDDEN_SIZE, KEY_DIM, heads, expand_v=1, layer_idx=0, **VARIANTS[variant]).eval()
    return record_layer(layer, torch.randn(1, steps, HIDDEN_SIZE))


def range_record(ranges: dict[str, tuple[float, float]], heads: int, steps: int, seed: int) -> LayerRecord:
    """Gates drawn evenly from ranges, keys evenly from the unit sphere."""
    rng = np.random.default_rng(seed)
    gates = {name: rng.uniform(*ranges[name], (steps, heads)) for name in ("alpha", "beta", "mu", "eta", "direct")}
    keys = rng.normal(size=(steps, heads, KEY_DIM))
    return LayerRecord(0, GateSample(**gates), keys / np.linalg.norm(keys, axis=-1, keepdims=True))


def analyse(record: LayerRecord, windows: list[int]) -> dict[str, Any]:
    """Single steps, products over windows, and the running product over the whole sequence, of one set of heads."""
    steps = len(record.keys)
    if min(windows) > steps:
        raise ValueError(f"--windows must have one of at most {steps} steps, the shortest is {min(windows)}")
    radius, pair = spectral_radius(record.gates), sample_pair(record.gates)
    return {
        "steps": steps,
        "heads": record.keys.shape[1],
        "largest spectral radius": float(radius.max()),
        "median spectral radius": float(np.median(radius)),
        "share of steps outside the unit disc": float((radius > 1 + 1e-12).mean()),
        "share of steps in the left half plane": float((pair.real.min(axis=-1) < 0).mean()),
        "share of steps with mu below 1/8": float((record.gates.mu < 0.125).mean()),
        "windows": growth_summary(record.gates, record.keys, [w for w in windows if w <= steps]),
        "whole": shares_over(running_growth(record.gates, record.keys, min(64, steps))),
    }


def guarantee(log_mus: np.ndarray) -> list[dict[str, float]]:
    """The guarantee by brute force: over all gates the layer's bounds allow at a given log mu, the smallest real part
    of an eigenvalue and the largest modulus. The closed form says: right half plane exactly down to log mu = -ln 8."""
    largest_alpha = np.linspace(1e-6, 1, 201)[:, None, None]
    eta = np.linspace(0, 2, 21)[None, :, None]
    share = np.linspace(0, 1, 5)[None, None, :]  # of the largest beta that is used; alpha at its largest is worst
    rows = []
    for log_mu in log_mus:
        beta = share * (1 - largest_alpha)
        pair = pair_eigenvalues(largest_alpha, beta, math.exp(log_mu), eta)
        smallest, largest = float(pair.real.min()), float(np.abs(pair).max())
        rows.append({"log mu": float(log_mu), "smallest real part": smallest, "largest modulus": largest})
    return rows


def guarantee_end(rows: list[dict[str, float]]) -> dict[str, float]:
    """The last log mu (from above) whose eigenvalues all stay right of the imaginary axis, next to -ln 8."""
    safe = [row["log mu"] for row in rows if row["smallest real part"] >= -1e-12]
    return {"found by sweep": min(safe), "closed form": GUARANTEED_LOG_MU}


def tables(content: dict[str, Any]) -> list[Table]:
    rows = []
    for name, entry in content["sources"].items():
        whole, longest = entry["whole"], entry["windows"][-1]
        rows.append(
            [
                name,
                f"{entry['largest spectral radius']:.4f}",
                f"{entry['share of steps in the left half plane']:.1%}",
                f"{longest['99 % log10 norm']:.1f} (over {longest['window']:,} steps)",
                f"{whole['largest log10 norm']:.1f}",
                f"{whole['share above 1e6']:.1%}",
                f"{whole['share above float32']:.1%}",
            ]
        )
    header = ["gates", "largest radius", "left half plane", "99 % log10 norm", "largest log10 norm on the way"]
    return [Table("single steps and products of steps", [*header, "heads above 1e6", "heads above float32"], rows)]


SMALLEST_SHOWN = -12
"""power of ten: products that shrink further are not drawn, as they would compress the rest of the figure"""


def draw(content: dict[str, Any]) -> Any:
    """Left: norm of products against the window; right: the smallest real part against log mu."""
    fig, (left, right) = figure("Stability: products of steps, and the guarantee", columns=2, size=(11.5, 4.0))
    for number, (names, entry) in enumerate(_coinciding(content["sources"])):
        rows, colour = entry["windows"], COLOURS[number % len(COLOURS)]
        window = [row["window"] for row in rows]
        left.plot(window, [row["99 % log10 norm"] for row in rows], "o-", color=colour, label=",\n".join(names))
        left.plot(window, [row["median log10 norm"] for row in rows], ":", color=colour)
    left.axhline(0, color="#999999", linewidth=0.8)
    largest = max(row["99 % log10 norm"] for entry in content["sources"].values() for row in entry["windows"])
    left.set_ylim(SMALLEST_SHOWN, max(largest + 2, 4))
    left.set(
        title="norm of the product: 99 % of heads (dotted: median)",
        xlabel="steps in the window",
        ylabel=f"not shown below 1e{SMALLEST_SHOWN}",
    )
    doubling_axis(left, window)
    powers_of_ten(left.yaxis)
    rows = content["guarantee"]
    right.plot([row["log mu"] for row in rows], [row["smallest real part"] for row in rows], color=COLOURS[0])
    right.axvline(GUARANTEED_LOG_MU, color=COLOURS[1], linestyle="--")
    right.text(GUARANTEED_LOG_MU + 0.06, right.get_ylim()[0], "log μ = −ln 8", color=COLOURS[1], va="bottom")
    right.axhline(0, color="#999999", linewidth=0.8)
    right.set(title="smallest real part inside the bounds", xlabel="log μ", ylabel="real part")
    legend_outside(fig, left)
    return fig


def _coinciding(sources: dict[str, dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Sources whose curves cannot be told apart (a tenth of a power of ten) share one curve and one entry."""
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for name, entry in sources.items():
        for names, shown in groups:
            pairs = zip(shown["windows"], entry["windows"])
            columns = ("99 % log10 norm", "median log10 norm")
            if all(abs(mine[c] - other[c]) < 0.1 for mine, other in pairs for c in columns):
                names.append(name)
                break
        else:
            groups.append(([name], entry))
    return groups

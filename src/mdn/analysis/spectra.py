"""`mdn analyze spectra`: the regions of the paper's spectral figure, and a trained model's own eigenvalues."""

from __future__ import annotations

from typing import Any

import numpy as np

from mdn.analysis.eigenvalues import (
    check_closed_form,
    quadrant_shares,
    region_eigenvalues,
    sample_pair,
    sampled_regions,
    spectral_radius,
)
from mdn.analysis.recording import LayerRecord
from mdn.common.plots import COLOURS, figure
from mdn.common.results import Table

PANEL_POINTS = 1500
TITLES = {
    "first order": "first order: α(1 − β), β up to 2",
    "unconstrained momentum": "momentum, β up to 1, η up to 2",
    "constrained momentum": "momentum, β < 1 − α, μ ≥ 1/e",
    "layer": "the layer's bounds, μ ≥ exp(−2)",
    "quasi-hyperbolic": "the same, a part written directly",
}


def spectra(points: int, seed: int, records: list[LayerRecord] | None = None) -> dict[str, Any]:
    """Shares per region and per layer, the check of the closed form, and the points of the figure's panels."""
    panels: dict[str, np.ndarray] = {}
    results: dict[str, Any] = {"points": points, "seed": seed, "regions": {}, "layers": []}
    for name, gates in sampled_regions(points, seed).items():
        panels[name] = region_eigenvalues(name, gates)
        radius = np.abs(panels[name]) if name == "first order" else spectral_radius(gates)
        results["regions"][name] = {
            **quadrant_shares(panels[name]),
            "largest spectral radius": float(radius.max()),
            "smallest real part": float(panels[name].real.min()),
        }
    for record in records or []:
        values = sample_pair(record.gates)
        title = f"layer {record.layer}, {values.shape[0]} tokens, {values.shape[1]} heads"
        panels[title] = values.reshape(-1)
        per_head = [quadrant_shares(values[:, head]) for head in range(values.shape[1])]
        results["layers"].append({"layer": record.layer, **quadrant_shares(values), "heads": per_head})
    samples = 200
    results["closed form against numpy.linalg.eigvals"] = {
        "samples": samples,
        "largest distance": check_closed_form(samples, seed),
    }
    results["panels"] = {title: _sample(values, seed) for title, values in panels.items()}
    return results


def _sample(values: np.ndarray, seed: int) -> list[list[float]]:
    """(real, imaginary) of at most PANEL_POINTS eigenvalues, to four digits: what a figure can show."""
    if len(values) > PANEL_POINTS:
        values = np.random.default_rng(seed).choice(values, PANEL_POINTS, replace=False)
    return [[round(float(value.real), 4), round(float(value.imag), 4)] for value in values]


def tables(content: dict[str, Any]) -> list[Table]:
    entries = {**content["regions"], **{f"layer {e['layer']} of the model": e for e in content["layers"]}}
    shares = ["positive real", "negative real", *(f"{n} quadrant" for n in ("1st", "2nd", "3rd", "4th"))]
    rows = [[name, *(f"{entry[share]:.1%}" for share in shares)] for name, entry in entries.items()]
    return [Table("share of the eigenvalues of single steps in each region", ["gates", *shares], rows)]


def draw(content: dict[str, Any]) -> Any:
    """One unit disc per panel."""
    panels = content["panels"]
    columns = len(panels) if len(panels) <= 4 else min((3, 4), key=lambda number: -len(panels) % number)
    rows = -(-len(panels) // columns)
    size = (3.1 * columns, 3.3 * rows + 0.3)
    fig, axes = figure("Eigenvalues of one step", "real", "imaginary", rows=rows, columns=columns, size=size)
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    for axis, (title, points) in zip(np.asarray(axes).flat, panels.items()):
        shown = np.array(points) @ [1, 1j]
        axis.plot(circle.real, circle.imag, color="#999999", linewidth=0.8)
        axis.axvline(0, color="#999999", linewidth=0.6)
        left = shown.real < 0
        for part, colour in ((shown[~left], COLOURS[0]), (shown[left], COLOURS[1])):
            axis.plot(part.real, part.imag, ".", markersize=1.5, alpha=0.5, color=colour, rasterized=True)
        axis.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
        axis.set_title(TITLES.get(title, title), fontsize=9)
    for axis in list(np.asarray(axes).flat)[len(panels) :]:
        axis.set_visible(False)
    return fig

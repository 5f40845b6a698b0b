"""What the cells of an ablation say together: one line per row, with spread over seeds and a verdict."""

from __future__ import annotations

from typing import Any

import numpy as np

from mdn.common.plots import COLOURS, figure, powers_of_ten
from mdn.common.results import Table
from mdn.experiments.ablation_cells import EXACT, PAPER, ROWS

GROWS = 6.0
"""log10: a disturbance that becomes a million times larger counts as growth of the state"""
ENOUGH_STEPS = 50
"""fewer steps than this say nothing about stability"""
IN_PAPER = "diverged at, paper's arithmetic"


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per row, in the order of the table."""
    rows = []
    for name, row in ROWS.items():
        exact = [r for r in results if r["row"] == name and r["arithmetic"] == EXACT]
        paper = [r for r in results if r["row"] == name and r["arithmetic"] == PAPER]
        if not exact and not paper:
            continue
        entry = {
            "row": name,
            "group": row.group,
            "paper reports": row.paper,
            "seeds": len(exact),
            "steps": min((r["steps"] for r in exact), default=0),
            "bits per byte": [r["held_out"]["bits_per_byte"] for r in exact if r["diverged"] is None],
            "diverged at": [r["diverged"] for r in exact],
            IN_PAPER: [r["diverged"] for r in paper],
            "largest log10 growth": max((float(r["largest log10 growth"]) for r in exact), default=None),
        }
        rows.append(entry | {"verdict": verdict(entry)})
    return rows


def verdict(entry: dict[str, Any]) -> str:
    """Arithmetic: only the paper's coefficients fail. Dynamics: the state itself grows, or the exact form fails.

    "stable" is a claim about training, so it needs some: a few steps that went well have tested nothing.
    """
    failed = any(step is not None for step in entry["diverged at"])
    failed_in_paper = any(step is not None for step in entry[IN_PAPER])
    grows = (entry["largest log10 growth"] or 0.0) > GROWS
    words = []
    if failed or grows:
        words.append("dynamics: " + ("diverges" if failed else "the state grows, training survives"))
    if failed_in_paper and entry["diverged at"] and not failed:
        words.append("arithmetic: only the log-domain form fails")
    if words:
        return "; ".join(words)
    if not entry["diverged at"] or entry["steps"] < ENOUGH_STEPS:
        return (
            f"not tested: {entry['steps']} steps" if entry["diverged at"] else "not tested: the exact form did not run"
        )
    return "stable" if entry[IN_PAPER] else "stable; paper's arithmetic not tested"


def _steps(values: list[int | None]) -> str:
    if not values:
        return "not run"
    return ", ".join("no" if step is None else f"step {step}" for step in values)


def tables(content: dict[str, Any]) -> list[Table]:
    rows = []
    for entry in content["rows"]:
        bits = entry["bits per byte"]
        spread = f"{np.mean(bits):.3f} ({min(bits):.3f} to {max(bits):.3f}, {len(bits)} seeds)" if bits else "–"
        spread = f"{bits[0]:.3f} (1 seed)" if len(bits) == 1 else spread
        growth = "–" if entry["largest log10 growth"] is None else f"{entry['largest log10 growth']:.1f}"
        exact, paper = _steps(entry["diverged at"]), _steps(entry[IN_PAPER])
        rows.append([entry["row"], entry["paper reports"], exact, spread, paper, growth, entry["verdict"]])
    header = ["row", "paper (400M)", "diverged, exact", "held-out bits per byte", "diverged, paper's arithmetic"]
    caption = f"{content['cells']} of {content['of']} cells"
    return [Table(caption, [*header, "log10 growth", "verdict"], rows)]


def draw(content: dict[str, Any]) -> Any:
    """Left: held-out bits per byte, every seed a point; right: growth of products of steps."""
    rows = content["rows"]
    fig, (left, right) = figure("Ablations at a small scale", columns=2, size=(9.6, 0.32 * len(rows) + 1.8))
    for place, entry in enumerate(rows):
        bits = entry["bits per byte"]
        left.plot(bits, [place] * len(bits), "o", color=COLOURS[0], alpha=0.7)
        if any(step is not None for step in entry["diverged at"]):
            left.text(
                0.99, place, "diverged", transform=left.get_yaxis_transform(), ha="right", va="center", fontsize=8
            )
        growth = entry["largest log10 growth"]
        if growth is not None:
            right.barh(place, min(growth, 45), color=COLOURS[1] if growth > GROWS else COLOURS[5])
            if growth > 45:
                right.text(44, place, "overflow", ha="right", va="center", fontsize=8, color="white")
    for axis in (left, right):
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_yticks(range(len(rows)), [entry["row"] for entry in rows] if axis is left else [])
    left.set(xlabel="held-out bits per byte (a point per seed)")
    right.axvline(GROWS, color="#999999", linewidth=0.8, linestyle="--")
    right.set(xlabel="growth of a disturbance (dashes: limit)")
    powers_of_ten(right.xaxis)
    return fig

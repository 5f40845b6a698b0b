"""What the cells of an ablation say together: one line per row, with spread over seeds and a verdict."""

from __future__ import annotations

from typing import Any

import numpy as np

from mdn.common.plots import COLOURS, figure, powers_of_ten
from mdn.common.results import Table
from mdn.experiments.ablation_cells import DEEP, EXACT, PAPER, ROWS
from mdn.experiments.studies.statistics import Interval, difference_interval

GROWS = 6.0
"""log10: a disturbance that becomes a million times larger counts as growth of the state"""
ENOUGH_STEPS = 50
"""fewer steps than this say nothing about stability"""
IN_PAPER = "diverged at, paper's arithmetic"
DIVERGED = "diverged at"
REFERENCE, DEEP_REFERENCE = "full", "8 layers"
"""the rows with which the others are compared: those of two layers, and those of eight"""


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
            DIVERGED: [r["diverged"] for r in exact],
            IN_PAPER: [r["diverged"] for r in paper],
            "largest log10 growth": max((float(r["largest log10 growth"]) for r in exact), default=None),
            "minutes": round(sum(r["seconds"] for r in (*exact, *paper)) / 60, 2),
        }
        rows.append(entry | {"verdict": verdict(entry)})
    return rows


def verdict(entry: dict[str, Any]) -> str:
    """Arithmetic: only the paper's coefficients fail. Dynamics: the state itself grows, or the exact form fails.

    "stable" is a claim about training, so it needs some: a few steps that went well have tested nothing.
    """
    failed = any(step is not None for step in entry[DIVERGED])
    failed_in_paper = any(step is not None for step in entry[IN_PAPER])
    grows = (entry["largest log10 growth"] or 0.0) > GROWS
    words = []
    if failed or grows:
        words.append("dynamics: " + ("diverges" if failed else "the state grows, training survives"))
    if failed_in_paper and entry[DIVERGED] and not failed:
        words.append("arithmetic: only the log-domain form fails")
    if words:
        return "; ".join(words)
    if not entry[DIVERGED] or entry["steps"] < ENOUGH_STEPS:
        return f"not tested: {entry['steps']} steps" if entry[DIVERGED] else "not tested: the exact form did not run"
    return "stable" if entry[IN_PAPER] else "stable; paper's arithmetic not tested"


def divergence(entry: dict[str, Any]) -> str:
    """Of what kind a row's failure is here: arithmetic, dynamics, or "" if nothing failed."""
    kind, _, _ = entry["verdict"].partition(":")
    return kind if kind in ("arithmetic", "dynamics") else ""


def reference_of(entry: dict[str, Any]) -> str | None:
    """The row with which a row is compared."""
    if entry["row"] in (REFERENCE, DEEP_REFERENCE):
        return None
    return DEEP_REFERENCE if DEEP.items() <= ROWS[entry["row"]].model.items() else REFERENCE


def difference(entry: dict[str, Any], rows: list[dict[str, Any]]) -> Interval | None:
    """Bits per byte minus those of the row's reference; None with fewer than two seeds of either."""
    bits: list[float] = next((row["bits per byte"] for row in rows if row["row"] == reference_of(entry)), [])
    if min(len(bits), len(entry["bits per byte"])) < 2:
        return None
    return difference_interval(entry["bits per byte"], bits)


def cells_of(entry: dict[str, Any]) -> int:
    return len(entry[DIVERGED]) + len(entry[IN_PAPER])


def added(recorded: dict[str, Any], content: dict[str, Any], command: str) -> dict[str, Any]:
    """``recorded`` with the rows of ``content``, which ``command`` measured, added or replaced."""
    if recorded["scale"] != content["scale"]:
        raise ValueError(
            f"--add-to: the rows there were trained with {recorded['scale']}, these with {content['scale']}"
        )
    rows = {row["row"]: row for row in recorded["rows"]}
    replaced = sum(cells_of(rows[row["row"]]) for row in content["rows"] if row["row"] in rows)
    rows |= {row["row"]: row | {"command": command} for row in content["rows"]}
    counts = {name: recorded[name] + content[name] - replaced for name in ("cells", "of")}
    return recorded | counts | {"rows": [rows[name] for name in ROWS if name in rows]}


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
        exact, paper = _steps(entry[DIVERGED]), _steps(entry[IN_PAPER])
        gap = _gap(difference(entry, content["rows"]))
        rows.append([entry["row"], entry["paper reports"], exact, spread, gap, paper, growth, entry["verdict"]])
    header = ["row", "paper (400M)", "diverged, exact", "held-out bits per byte", "minus the full model"]
    caption = f"{content['cells']} of {content['of']} cells; hybrids minus 8 layers, bold: significant"
    return [Table(caption, [*header, "diverged, paper's arithmetic", "log10 growth", "verdict"], rows)]


def _gap(found: Interval | None) -> str:
    """With Welch's 95 % interval."""
    if found is None:
        return "–"
    words = f"{found.mean:.3f} ± {found.half_width:.3f}"
    return f"**{words}**" if found.leaves_out_zero else words


def draw(content: dict[str, Any]) -> Any:
    """Left: held-out bits per byte, every seed a point; right: growth of products of steps."""
    rows = content["rows"]
    fig, (left, right) = figure("Ablations at a small scale", columns=2, size=(9.6, 0.32 * len(rows) + 1.8))
    for place, entry in enumerate(rows):
        bits = entry["bits per byte"]
        left.plot(bits, [place] * len(bits), "o", color=COLOURS[0], alpha=0.7)
        if any(step is not None for step in entry[DIVERGED]):
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

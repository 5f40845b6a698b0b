"""Loss curves as inline SVG: no script, colours that work on light and dark ground, readable at any width."""

from __future__ import annotations

import math
from html import escape

from mdn.analysis.report.collect import TrainingRun

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 320, 46, 34
POINTS = 300
MOST_CURVES = 8
# Readable on white and on near-black.
COLOURS = ("#0a84d0", "#d5600d", "#0f9d76", "#c0629b", "#b98a00", "#7f7f86", "#8d6fd1", "#c24141")


def loss_charts(runs: list[TrainingRun]) -> str:
    """A chart for every eight runs that have steps."""
    drawn = [run for run in runs if run.steps]
    return "".join(_chart(drawn[i : i + MOST_CURVES]) for i in range(0, len(drawn), MOST_CURVES))


def _chart(runs: list[TrainingRun]) -> str:
    curves = [_smoothed([(line["tokens"], line["loss"]) for line in run.steps]) for run in runs]
    finite = [y for curve in curves for _, y in curve if math.isfinite(y)]
    low, high = min(finite, default=0.0), sorted(finite)[int(0.98 * (len(finite) - 1))] if finite else 1.0
    high = max(high, low + 1e-6)
    right = max((x for curve in curves for x, _ in curve), default=1)

    def x_of(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - 24) * tokens / right  # room for half of the last label

    def y_of(loss: float) -> float:
        share = min(max((loss - low) / (high - low), -0.02), 1.03)
        return 10 + (HEIGHT - BOTTOM - 10) * (1 - share)

    parts = [f'<path class="axis" d="M{LEFT} 8V{HEIGHT - BOTTOM}H{WIDTH - 8}"></path>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        loss, tokens = low + share * (high - low), share * right
        parts.append(f'<text x="{LEFT - 5}" y="{y_of(loss) + 3:.1f}" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<text x="{x_of(tokens):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{_short(tokens)}</text>')
    parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">tokens; nats per token</text>')
    for number, curve in enumerate(curves):
        points = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in curve if math.isfinite(y))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="1.6"></path>')
    names = "".join(
        f'<li><span style="color:{COLOURS[n % len(COLOURS)]}"></span>{escape(run.name)}</li>'
        for n, run in enumerate(runs)
    )
    label = f"training loss of {len(runs)} runs, the last values are in the table below"
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<figure class="chart">{svg}<ul class="legend">{names}</ul></figure>'


def _smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over equal pieces, at most POINTS of them."""
    width = max(len(points) // POINTS, 1)
    pieces = [points[i : i + width] for i in range(0, len(points), width)]
    return [(piece[-1][0], sum(y for _, y in piece) / len(piece)) for piece in pieces]


def _short(tokens: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"

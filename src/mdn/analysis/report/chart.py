"""Loss curves as inline SVG: no script, colours for light and dark backgrounds, a wide and a narrow drawing."""

from __future__ import annotations

import math
from html import escape

from mdn.analysis.report.collect import TrainingRun
from mdn.common.plots import short_count

POINTS = 300
MOST_CURVES = 8
# Readable on white and on near-black.
COLOURS = ("#0a84d0", "#d5600d", "#0f9d76", "#c0629b", "#b98a00", "#7f7f86", "#8d6fd1", "#c24141")
Points = list[tuple[float, float]]
# A drawing is scaled to the width of the page: text of the same size needs a drawing of about that width.
WIDE, NARROW = (900, 340), (360, 280)
LEFT, RIGHT, TOP, BOTTOM = 44, 24, 30, 42


def loss_charts(runs: list[TrainingRun]) -> str:
    """A chart for every eight runs that have steps."""
    drawn = [run for run in runs if any(math.isfinite(line["loss"]) for line in run.steps)]
    return "".join(_chart(drawn[i : i + MOST_CURVES]) for i in range(0, len(drawn), MOST_CURVES))


def _chart(runs: list[TrainingRun]) -> str:
    curves = [_smoothed([(line["tokens"], line["loss"]) for line in run.steps]) for run in runs]
    names = "".join(
        f'<li><span style="color:{COLOURS[n % len(COLOURS)]}"></span>{escape(run.name)}</li>'
        for n, run in enumerate(runs)
    )
    label = f"training loss of {len(runs)} runs, the last values are in the table below"
    drawings = _drawing(curves, *WIDE, "wide", label) + _drawing(curves, *NARROW, "narrow", label)
    return f'<figure class="chart">{drawings}<ul class="legend">{names}</ul></figure>'


def _drawing(curves: list[Points], width: int, height: int, size: str, label: str) -> str:
    """The whole range of the loss: nothing is clipped."""
    losses = [y for curve in curves for _, y in curve]
    y_ticks = round_ticks(min(losses), max(losses), 5)
    right = max(x for curve in curves for x, _ in curve)
    x_ticks = [tick for tick in round_ticks(0, right, 8 if size == "wide" else 4) if tick <= right]
    low, high = y_ticks[0], y_ticks[-1]

    def x_of(tokens: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * tokens / right

    def y_of(loss: float) -> float:
        return TOP + (height - TOP - BOTTOM) * (high - loss) / (high - low)

    floor = height - BOTTOM
    parts = [f'<text x="{LEFT - 38}" y="14">loss, nats per token</text>']
    for loss in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y_of(loss):.1f}H{width - RIGHT}"></path>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for tokens in x_ticks:
        parts.append(f'<text x="{x_of(tokens):.1f}" y="{floor + 17}" text-anchor="middle">{short_count(tokens)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{width - RIGHT}"></path>')
    parts.append(f'<text x="{width - RIGHT}" y="{height - 6}" text-anchor="end">tokens</text>')
    for number, curve in enumerate(curves):
        points = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in curve)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="1.8"></path>')
    return f'<svg class="{size}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _smoothed(points: Points) -> Points:
    """Means over equal pieces of what is finite, at most about POINTS of them."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    width = max(len(finite) // POINTS, 1)
    pieces = [finite[i : i + width] for i in range(0, len(finite), width)]
    return [(piece[-1][0], sum(y for _, y in piece) / len(piece)) for piece in pieces]


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers at equal distances that enclose low and high."""
    high = high if high > low else low + 1
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]

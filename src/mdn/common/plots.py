"""One look for every figure, and one way to save it: PNG and SVG, with the command that made it written below.

fig, axis = figure(title="...", x="step", y="loss")
save_figure(fig, "runs/demo/loss.png", command="mdn train recipes/demo.yaml")
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # figures are files here; no display is needed or looked for

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mdn.common.results import command_line

# Distinguishable with the common colour-vision deficiencies (Okabe and Ito's palette, darkest first).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#B8A800", "#7A5195", "#8C564B")

# A mixer has the same colour in every figure.
MIXER_COLOURS = {
    "momentum_deltanet": COLOURS[1],
    "gated_deltanet": COLOURS[0],
    "comba": COLOURS[2],
    "kda": COLOURS[3],
    "mamba2": COLOURS[4],
    "attention": COLOURS[6],
    "deltanet": COLOURS[5],
    "gla": COLOURS[7],
    "linear_attention": COLOURS[9],
    "rwkv7": COLOURS[8],
    "momentum_kda": "#800020",
    "gated_deltaproduct": "#3A6B35",
}

STYLE: Any = {
    "figure.figsize": (6.4, 4.0),
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=COLOURS),
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: searchable and small
    "svg.hashsalt": "mdn",  # the same figure gives the same file
}
plt.rcParams.update(STYLE)


def figure(
    title: str = "",
    x: str = "",
    y: str = "",
    *,
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] | None = None,
) -> tuple[Figure, Any]:
    """A figure in the project's style: one axis, or an array `[rows, columns]` of them if there is more than one."""
    fig, axes = plt.subplots(rows, columns, figsize=size or STYLE["figure.figsize"], layout="constrained")
    if isinstance(axes, Axes):
        axes.set(title=title, xlabel=x, ylabel=y)
    else:
        fig.suptitle(title, fontweight="bold")
        for axis in axes.flat:
            axis.set(xlabel=x, ylabel=y)
    return fig, axes


def legend_outside(fig: Figure, axis: Axes) -> None:
    """The axis's legend to the right of all axes, where it covers no curve."""
    fig.legend(*axis.get_legend_handles_labels(), loc="outside right center", fontsize=8)


def doubling_axis(axis: Axes, values: Iterable[int]) -> None:
    """A logarithmic x axis with plain numbers at the given values."""
    values = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.minorticks_off()


def plain_log_axis(axis: Axes) -> None:
    """A logarithmic y axis with plain numbers: 1, 2, 5, 10, 20, ..."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def count_axis(axis: Axes) -> None:
    """Large numbers on the x axis as 200k, 1.5M instead of 1.5 and a factor 1e6 in a corner."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def short_count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def powers_of_ten(axis: Any) -> None:
    """Ticks of an x or y axis of exponents as the numbers they stand for."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{value:g}}}$"))


def save_figure(fig: Figure, path: str | Path, command: str | None = None) -> list[Path]:
    """Write `path` as PNG and SVG (whatever suffix it has), with the command as a footer and as metadata."""
    command = command or command_line()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = command if len(command) <= 110 else command[:107] + "..."
    # supxlabel takes part in the constrained layout, so the footer never covers an axis label.
    fig.supxlabel(shown, fontsize=6, color="#888888", x=0.01, ha="left", family="monospace")
    written = []
    for suffix, metadata in ((".png", {"Description": command}), (".svg", {"Description": command, "Date": None})):
        target = path.with_suffix(suffix)
        fig.savefig(target, metadata=metadata)
        written.append(target)
    plt.close(fig)
    return written

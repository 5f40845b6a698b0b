"""Heat-maps of needle tests: rows over columns, green where the needle was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdn.evaluation.suites import Suite
from mdn.evaluation.tables import Results, number_of


def draw_heat_maps(
    maps: dict[str, np.ndarray],
    rows: Sequence[str],
    columns: Sequence[str],
    path: Path,
    *,
    y: str,
    x: str,
    command: str | None = None,
) -> list[Path]:
    """One panel per entry of ``maps``: scores in [0, 1], [rows, columns], NaN where there is none."""
    from mdn.common.plots import figure, save_figure

    width = max(3.0, 1.4 + 0.55 * len(columns))
    size = (1.0 + width * len(maps), 1.4 + 0.42 * len(rows))
    fig, axes = figure("", x, "", columns=len(maps), size=size)
    panels = [axes] if len(maps) == 1 else list(axes.flat)
    for number, (axis, (title, scores)) in enumerate(zip(panels, maps.items())):
        image = axis.imshow(scores, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set(title=title, ylabel=y if number == 0 else "")
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
        axis.grid(False)
        for place, score in np.ndenumerate(scores):
            if not np.isnan(score):
                axis.text(place[1], place[0], f"{100 * score:.0f}", ha="center", va="center", fontsize=7)
    fig.colorbar(image, ax=panels, label="found", shrink=0.9)
    return save_figure(fig, path, command)


def draw_suite(suite: Suite, results: dict[str, Results], path: Path) -> list[Path]:
    """RULER's tasks over haystack lengths, a panel per model."""
    tasks = list(dict.fromkeys(column.group for column in suite.columns))
    lengths = list(dict.fromkeys(column.title for column in suite.columns))
    maps: dict[str, Any] = {}
    for label, found in results.items():
        scores = np.full((len(tasks), len(lengths)), np.nan)
        for column in suite.columns:
            number = number_of(column, found)
            if number is not None:
                scores[tasks.index(column.group), lengths.index(column.title)] = number / 100
        maps[label] = scores
    return draw_heat_maps(maps, tasks, lengths, path, y="task", x="length")

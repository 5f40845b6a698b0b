"""What an MQAR grid found: the best learning rate of every mixer, a table with mean and spread, and the figure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.evaluation.mqar.grid import mean_accuracy
from mdn.evaluation.mqar.recipe import MqarRecipe, Segment


@dataclass(frozen=True)
class Chosen:
    """A mixer of one size at its best learning rate; ``accuracy`` by segment has one entry per seed."""

    mixer: str
    hidden_size: int
    learning_rate: float
    parameters: int
    state_numbers: int
    accuracy: dict[str, list[float]]

    def mean(self, segment: str) -> float:
        return statistics.fmean(self.accuracy[segment])

    def spread(self, segment: str) -> float:
        """The standard deviation over seeds (0 for a single one)."""
        return statistics.stdev(self.accuracy[segment]) if len(self.accuracy[segment]) > 1 else 0.0

    def overall(self) -> list[float]:
        """The mean over segments, seed by seed."""
        return [statistics.fmean(values) for values in zip(*self.accuracy.values())]


def choose(results: dict[str, dict[str, Any]]) -> list[Chosen]:
    """Per mixer and size, the learning rate with the best accuracy, averaged over seeds and test segments (as zoology
    chooses it: on the test segments)."""
    runs: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in results.values():
        cell = result["cell"]
        runs[cell["mixer"], cell["hidden_size"]][cell["learning_rate"]].append(result)
    chosen = []
    for (mixer, hidden_size), by_rate in runs.items():
        # A rate whose seeds are not all there yet cannot win by a lucky one.
        complete = max(len(group) for group in by_rate.values())
        rates = [rate for rate, group in by_rate.items() if len(group) == complete]
        best = max(rates, key=lambda rate: statistics.fmean(map(mean_accuracy, by_rate[rate])))
        group = sorted(by_rate[best], key=lambda result: result["cell"]["seed"])
        accuracy = {name: [result["accuracy"][name] for result in group] for name in group[0]["accuracy"]}
        sizes = group[0]["parameters"], group[0]["state_numbers"]
        chosen.append(Chosen(mixer, hidden_size, best, *sizes, accuracy))
    return chosen


def table(recipe: MqarRecipe, chosen: list[Chosen]) -> str:
    """Markdown: a row per mixer and size, a column per test segment (length:pairs), accuracy in % as mean ± spread."""
    names = [segment.name for segment in recipe.test]
    heads = ["mixer", "d", "learning rate", "seeds", "state", *names, "mean"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in sorted(chosen, key=lambda row: (row.hidden_size, -statistics.fmean(row.overall()))):
        overall = row.overall()
        spread = statistics.stdev(overall) if len(overall) > 1 else 0.0
        facts = [row.mixer, str(row.hidden_size), f"{row.learning_rate:g}", str(len(overall)), f"{row.state_numbers:,}"]
        cells = [f"{100 * row.mean(name):.1f} ± {100 * row.spread(name):.1f}" for name in names]
        lines.append(
            "| " + " | ".join([*facts, *cells, f"{100 * statistics.fmean(overall):.1f} ± {100 * spread:.1f}"]) + " |"
        )
    return "\n".join(lines) + "\n"


def draw(recipe: MqarRecipe, chosen: list[Chosen], path: Path, command: str | None = None) -> list[Path]:
    """Accuracy against the number of pairs, a panel per length and a row per model size; bars are the spread."""
    from mdn.common.plots import MIXER_COLOURS, figure, save_figure

    lengths = sorted({segment.length for segment in recipe.test})
    sizes = sorted({row.hidden_size for row in chosen})
    size = (1.0 + 2.6 * len(lengths), 1.2 + 2.6 * len(sizes))
    fig, axes = figure("", "pairs", "", rows=len(sizes), columns=len(lengths), size=size)
    panels = [axes] if len(sizes) * len(lengths) == 1 else list(axes.flat)
    for number, axis in enumerate(panels):
        length, hidden_size = lengths[number % len(lengths)], sizes[number // len(lengths)]
        segments = sorted((s for s in recipe.test if s.length == length), key=lambda s: s.pairs)
        for row in (row for row in chosen if row.hidden_size == hidden_size):
            _draw_line(axis, row, segments, MIXER_COLOURS[row.mixer])
        axis.set(title=f"length {length}, d {hidden_size}", ylim=(-0.03, 1.03), xscale="log")
        axis.set_xticks([s.pairs for s in segments], [str(s.pairs) for s in segments], minor=False)
        axis.minorticks_off()
        if number % len(lengths) == 0:
            axis.set_ylabel("accuracy")
    fig.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(6, len(chosen)), fontsize=8
    )
    return save_figure(fig, path, command)


def _draw_line(axis: Any, row: Chosen, segments: list[Segment], colour: str) -> None:
    names = [segment.name for segment in segments]
    axis.errorbar(
        [segment.pairs for segment in segments],
        [row.mean(name) for name in names],
        yerr=[row.spread(name) for name in names],
        color=colour,
        marker="o",
        capsize=2,
        label=row.mixer,
    )


def as_json(recipe: MqarRecipe, chosen: list[Chosen]) -> dict[str, Any]:
    return {
        "recipe": recipe.model_dump(mode="json"),
        "chosen": [
            {
                "mixer": row.mixer,
                "hidden_size": row.hidden_size,
                "learning_rate": row.learning_rate,
                "parameters": row.parameters,
                "state_numbers": row.state_numbers,
                "accuracy": row.accuracy,
                "mean": {name: row.mean(name) for name in row.accuracy},
                "spread": {name: row.spread(name) for name in row.accuracy},
            }
            for row in chosen
        ],
    }

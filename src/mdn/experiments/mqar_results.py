"""What an MQAR grid found: the best learning rate of every mixer, a table with mean and spread, MDN's differences from
the others with Welch's 95 % interval, and the figure.

Also the test segments of a recipe as a suite of `mdn eval`, for models of `mdn mqar --save-models`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from mdn.common.results import Table
from mdn.evaluation.suites import Column, Job, Suite
from mdn.experiments.mqar import MqarRecipe, segment_accuracy
from mdn.experiments.studies.statistics import Interval, difference_interval

Chosen = dict[str, Any]
"""a mixer of one size at its best learning rate; ``accuracy`` has a list over seeds for every test segment"""
REFERENCE = "momentum_deltanet"
"""the mixer with which the others are compared"""


def mean_accuracy(result: dict[str, Any]) -> float:
    return statistics.fmean(result["accuracy"].values())


def choose(results: Iterable[dict[str, Any]]) -> list[Chosen]:
    """Per mixer and size, the learning rate with the best accuracy, averaged over seeds and test segments (as zoology
    chooses it: on the test segments)."""
    runs: dict[tuple[str, int], dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        cell = result["cell"]
        runs[cell["mixer"], cell["hidden_size"]][cell["learning_rate"]].append(result)
    chosen = []
    for (mixer, hidden_size), by_rate in runs.items():
        # A rate whose seeds are not all there yet cannot win by a lucky one.
        complete = max(len(group) for group in by_rate.values())
        rates = [rate for rate, group in by_rate.items() if len(group) == complete]
        best = max(rates, key=lambda rate: statistics.fmean(map(mean_accuracy, by_rate[rate])))
        group = sorted(by_rate[best], key=lambda result: result["cell"]["seed"])
        chosen.append(
            {
                "mixer": mixer,
                "hidden_size": hidden_size,
                "learning_rate": best,
                "parameters": group[0]["parameters"],
                "state_numbers": group[0]["state_numbers"],
                "accuracy": {name: [result["accuracy"][name] for result in group] for name in group[0]["accuracy"]},
            }
        )
    return chosen


def spread(values: list[float]) -> float:
    """The standard deviation over seeds (0 for a single one)."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def seed_means(row: Chosen) -> list[float]:
    """The mean over segments, seed by seed."""
    return [statistics.fmean(values) for values in zip(*row["accuracy"].values())]


def tables(content: dict[str, Any]) -> list[Table]:
    """Accuracy in % as mean ± spread, a row per mixer and size, a column per test segment (length:pairs); then the
    differences from MDN, where a grid has more than one seed of it."""
    names = list(content["chosen"][0]["accuracy"]) if content["chosen"] else []
    rows = []
    for row in sorted(content["chosen"], key=lambda row: (row["hidden_size"], -statistics.fmean(seed_means(row)))):
        seeds = seed_means(row)
        facts = [row["mixer"], f"{row['hidden_size']}", f"{row['learning_rate']:g}", f"{len(seeds)}"]
        cells = [_percent(values) for values in (*(row["accuracy"][name] for name in names), seeds)]
        rows.append([*facts, f"{row['state_numbers']:,}", *cells, ", ".join(f"{100 * mean:.1f}" for mean in seeds)])
    name = content["recipe"]["name"]
    caption = f"{name}: accuracy in %, mean ± standard deviation over seeds, by length:pairs"
    header = ["mixer", "d", "learning rate", "seeds", "state", *names, "mean", "mean by seed"]
    differences = _difference_table(
        content, f"{name}: {REFERENCE} minus the others in points, with Welch's 95 % interval"
    )
    return [Table(caption, header, rows), *differences]


def _percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.1f} ± {100 * spread(values):.1f}"


def compared(content: dict[str, Any]) -> list[tuple[Chosen, Chosen]]:
    """MDN and another mixer of the same size, both with at least two seeds; the best others first."""
    by_size = {row["hidden_size"]: row for row in content["chosen"] if row["mixer"] == REFERENCE}
    pairs = [
        (by_size[row["hidden_size"]], row)
        for row in content["chosen"]
        if row["mixer"] != REFERENCE and row["hidden_size"] in by_size
    ]
    pairs.sort(key=lambda pair: (pair[0]["hidden_size"], -statistics.fmean(seed_means(pair[1]))))
    return [pair for pair in pairs if min(len(seed_means(row)) for row in pair) > 1]


def verdict(difference: Interval, other: str) -> str:
    if not difference.leaves_out_zero:
        return "no significant difference"
    return f"{REFERENCE if difference.mean > 0 else other} is better"


def _difference_table(content: dict[str, Any], caption: str) -> list[Table]:
    rows, names = [], []
    for mdn, other in compared(content):
        names = list(mdn["accuracy"])
        by_segment = [difference_interval(mdn["accuracy"][name], other["accuracy"][name]) for name in names]
        overall = difference_interval(seed_means(mdn), seed_means(other))
        cells = [_difference(difference) for difference in (*by_segment, overall)]
        rows.append([other["mixer"], f"{other['hidden_size']}", *cells, verdict(overall, other["mixer"])])
    header = ["minus", "d", *names, "mean", "verdict on the mean"]
    return [Table(f"{caption}; bold: significant", header, rows)] if rows else []


def _difference(difference: Interval) -> str:
    mean, half = (round(100 * value, 1) + 0.0 for value in difference)  # + 0.0: no "-0.0"
    return f"**{mean:.1f} ± {half:.1f}**" if difference.leaves_out_zero else f"{mean:.1f} ± {half:.1f}"


def draw(content: dict[str, Any]) -> Any:
    """Accuracy by test segment, a panel per model size; lines join segments of one length, bars reach from the worst
    to the best seed (a standard deviation would leave the axis, which ends at 100 %)."""
    from mdn.common.plots import MIXER_COLOURS, figure, legend_outside

    chosen = content["chosen"]
    task = "MQAR with rewriting" if content["recipe"]["task"]["rewriting"] else "MQAR"
    test = sorted((segment["length"], segment["pairs"]) for segment in content["recipe"]["test"])
    lengths = sorted({length for length, _ in test})
    places = [number + 0.6 * lengths.index(length) for number, (length, _) in enumerate(test)]  # a gap between lengths
    names = [f"{length}:{pairs}" for length, pairs in test]
    sizes = sorted({row["hidden_size"] for row in chosen})
    fig, axes = figure("", rows=len(sizes), size=(9.5, 0.8 + 3.0 * len(sizes)))
    panels = [axes] if len(sizes) == 1 else list(axes.flat)
    for axis, hidden_size in zip(panels, sizes):
        shown = [row for row in chosen if row["hidden_size"] == hidden_size]
        for number, row in enumerate(shown):
            aside = 0.07 * (number - (len(shown) - 1) / 2)  # bars of one segment side by side
            for length in lengths:
                mine = [i for i, (other, _) in enumerate(test) if other == length]
                scores = [[100 * value for value in row["accuracy"][names[i]]] for i in mine]
                means = [statistics.fmean(values) for values in scores]
                below = [mean - min(values) for mean, values in zip(means, scores)]
                above = [max(values) - mean for mean, values in zip(means, scores)]
                axis.errorbar(
                    [places[i] + aside for i in mine],
                    means,
                    yerr=np.clip([below, above], 0, None),  # equal seeds: rounding can put their mean outside them
                    color=MIXER_COLOURS[row["mixer"]],
                    marker="o",
                    capsize=2,
                    elinewidth=1.0,
                    label=row["mixer"] if length == lengths[0] else None,
                )
        axis.set(title=f"{task}, d {hidden_size}", ylim=(-3, 103), xlabel="length:pairs")
        axis.set_ylabel("accuracy, % (bars: worst to best seed)")
        axis.set_xticks(places, names)
    legend_outside(fig, panels[0])
    return fig


# ------------------------------------------------------------------------------------------------ a suite of `mdn eval`


def mqar_suite(recipe: MqarRecipe) -> Suite:
    columns = (
        Column(f"length {segment.length}", f"{segment.pairs} pairs", Job(f"mqar-{segment.name}"), "acc")
        for segment in recipe.test
    )
    return Suite("mqar", tuple(columns), average="acc ↑")


def mqar_results(model: Any, recipe: MqarRecipe) -> dict[Job, dict[str, Any]]:
    if model.config.vocab_size < recipe.task.vocab_size:
        raise ValueError(
            f"the model's vocabulary of {model.config.vocab_size} is smaller than the recipe's task.vocab_size="
            f"{recipe.task.vocab_size}; --suite mqar is for models of `mdn mqar --save-models`"
        )
    found = segment_accuracy(model, recipe)
    return {Job(f"mqar-{name}"): {"metrics": {"acc": accuracy}} for name, accuracy in found.items()}

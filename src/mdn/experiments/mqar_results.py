"""What an MQAR grid found: the best learning rate of every mixer, a table with mean and spread, and the figure.

Also the test segments of a recipe as a suite of `mdn eval`, for models of `mdn mqar --save-models`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mdn.common.results import Table
from mdn.evaluation.suites import Column, Suite, Work
from mdn.experiments.mqar import MqarRecipe, Segment, segment_accuracy

Chosen = dict[str, Any]
"""a mixer of one size at its best learning rate; ``accuracy`` has a list over seeds for every test segment"""


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


def _overall(row: Chosen) -> list[float]:
    """The mean over segments, seed by seed."""
    return [statistics.fmean(values) for values in zip(*row["accuracy"].values())]


def tables(content: dict[str, Any]) -> list[Table]:
    """A row per mixer and size, a column per test segment (length:pairs), accuracy in % as mean ± spread."""
    names = list(content["chosen"][0]["accuracy"]) if content["chosen"] else []
    rows = []
    for row in sorted(content["chosen"], key=lambda row: (row["hidden_size"], -statistics.fmean(_overall(row)))):
        seeds = _overall(row)
        facts = [row["mixer"], f"{row['hidden_size']}", f"{row['learning_rate']:g}", f"{len(seeds)}"]
        cells = [_percent(values) for values in (*(row["accuracy"][name] for name in names), seeds)]
        rows.append([*facts, f"{row['state_numbers']:,}", *cells])
    caption = f"{content['recipe']['name']}: accuracy in %, mean ± standard deviation over seeds, by length:pairs"
    return [Table(caption, ["mixer", "d", "learning rate", "seeds", "state", *names, "mean"], rows)]


def _percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.1f} ± {100 * spread(values):.1f}"


def draw(content: dict[str, Any]) -> Any:
    """Accuracy against the number of pairs, a panel per length and a row per model size; bars are the spread."""
    from mdn.common.plots import MIXER_COLOURS, figure

    chosen, test = content["chosen"], [Segment.model_validate(segment) for segment in content["recipe"]["test"]]
    lengths = sorted({segment.length for segment in test})
    sizes = sorted({row["hidden_size"] for row in chosen})
    size = (1.0 + 2.6 * len(lengths), 1.2 + 2.6 * len(sizes))
    fig, axes = figure("", "pairs", "", rows=len(sizes), columns=len(lengths), size=size)
    panels = [axes] if len(sizes) * len(lengths) == 1 else list(axes.flat)
    for number, axis in enumerate(panels):
        length, hidden_size = lengths[number % len(lengths)], sizes[number // len(lengths)]
        segments = sorted((s for s in test if s.length == length), key=lambda s: s.pairs)
        for row in (row for row in chosen if row["hidden_size"] == hidden_size):
            scores = [row["accuracy"][segment.name] for segment in segments]
            axis.errorbar(
                [segment.pairs for segment in segments],
                [100 * statistics.fmean(values) for values in scores],
                yerr=[100 * spread(values) for values in scores],
                color=MIXER_COLOURS[row["mixer"]],
                marker="o",
                capsize=2,
                label=row["mixer"],
            )
        axis.set(title=f"length {length}, d {hidden_size}", ylim=(-3, 103), xscale="log")
        axis.set_xticks([s.pairs for s in segments], [str(s.pairs) for s in segments], minor=False)
        axis.minorticks_off()
        if number % len(lengths) == 0:
            axis.set_ylabel("accuracy, %")
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    return fig


# ------------------------------------------------------------------------------------------------ a suite of `mdn eval`


def mqar_suite(recipe: MqarRecipe) -> Suite:
    columns = (
        Column(f"length {segment.length}", f"{segment.pairs} pairs", Work(f"mqar-{segment.name}"), "acc")
        for segment in recipe.test
    )
    return Suite("mqar", tuple(columns), average="acc ↑")


def mqar_results(model: Any, recipe: MqarRecipe) -> dict[Work, dict[str, Any]]:
    if model.config.vocab_size < recipe.task.vocab_size:
        raise ValueError(
            f"the model's vocabulary of {model.config.vocab_size} is smaller than the recipe's task.vocab_size="
            f"{recipe.task.vocab_size}; --suite mqar is for models of `mdn mqar --save-models`"
        )
    found = segment_accuracy(model, recipe)
    return {Work(f"mqar-{name}"): {"metrics": {"acc": accuracy}} for name, accuracy in found.items()}

"""Generated sentences and tables of docs/experiments/mqar.md, ablations.md and dynamics.md (see ``studies.pages``).

Every number and every verdict comes from the recorded results, differences with Welch's 95 % interval.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from mdn.common.results import Table, read_results
from mdn.experiments.ablation_results import REFERENCE, cells_of, difference, divergence, reference_of
from mdn.experiments.mqar_results import REFERENCE as MDN
from mdn.experiments.mqar_results import Chosen, compared, seed_means
from mdn.experiments.studies.answers import joined, listed, paragraph
from mdn.experiments.studies.statistics import difference_interval
from mdn.experiments.studies.study import ACCURACY, BITS
from mdn.experiments.studies.summary import seed_means as study_seed_means

# ----------------------------------------------------------------------------------------------------------------- MQAR

LABELS = {
    MDN: "MDN",
    "gated_deltanet": "Gated DeltaNet",
    "comba": "Comba",
    "kda": "KDA",
    "mamba2": "Mamba2",
}
MQAR = {"plain MQAR": "mqar_quick.json", "MQAR with rewriting": "mqar_rewrite.json"}
SCATTERED = 0.1
"""half of an interval, in accuracy, beyond which a difference says little because seeds scatter"""


def _mqar(data: Path) -> dict[str, dict[str, Any]]:
    return {task: read_results(data / name, "mqar") for task, name in MQAR.items()}


def _label(row: Chosen) -> str:
    return LABELS.get(row["mixer"], str(row["mixer"]))


def mqar_answer(data: Path) -> str:
    """MDN against the others on both tasks, by the mean over test segments: two sentences."""
    return paragraph([f"On {task}, {_mqar_clauses(content)}" for task, content in _mqar(data).items()])


def _mqar_clauses(content: dict[str, Any]) -> str:
    better: list[str] = []
    worse: list[str] = []
    level: list[str] = []
    scattered: list[str] = []
    for mdn, other in compared(content):
        found = difference_interval(seed_means(mdn), seed_means(other))
        if found.leaves_out_zero:
            into = better if found.mean > 0 else worse
        else:
            into = scattered if found.half_width > SCATTERED else level
        into.append(_with_mean(other))
    mdn = next(row for row in content["chosen"] if row["mixer"] == MDN)
    clauses = [f"is better than {listed(better)}"] if better else []
    clauses += [f"is worse than {listed(worse)}"] if worse else []
    groups = [listed(level)] if level else []
    groups += [f"{listed(scattered)}, whose seeds lie far apart"] if scattered else []
    clauses += [f"does not differ significantly from {', nor from '.join(groups)}"] if groups else []
    return f"{_with_mean(mdn)} {joined(clauses)}"


def _with_mean(row: Chosen) -> str:
    return f"{_label(row)} ({ACCURACY.in_words(statistics.fmean(seed_means(row)))})"


def mqar_segments(data: Path) -> str:
    """On which segments MDN differs from whom: a sentence per task."""
    return paragraph([f"On {task}, {_segment_clauses(content)}" for task, content in _mqar(data).items()])


def _segment_clauses(content: dict[str, Any]) -> str:
    where: dict[tuple[str, str], list[str]] = {}
    nowhere: list[str] = []
    for mdn, other in compared(content):
        found = {name: difference_interval(values, other["accuracy"][name]) for name, values in mdn["accuracy"].items()}
        for verb, sign in (("better", 1), ("worse", -1)):
            names = [name for name, gap in found.items() if gap.leaves_out_zero and gap.mean * sign > 0]
            if names:
                at = "on every segment" if len(names) == len(found) else f"at {listed(names)}"
                where.setdefault((verb, at), []).append(_label(other))
        if not any(gap.leaves_out_zero for gap in found.values()):
            nowhere.append(_label(other))
    clauses = [f"{verb} than {listed(names)} {at}" for (verb, at), names in where.items()]
    said = [f"MDN is {joined(clauses)}"] if clauses else []
    said += (
        [f"{'it' if clauses else 'MDN'} does not differ significantly from {listed(nowhere, 'or')} on any segment"]
        if nowhere
        else []
    )
    return "; ".join(said)


def mqar_both(data: Path) -> str:
    """The last segment that both tasks test, seed by seed."""
    plain, rewriting = ({row["mixer"]: row for row in content["chosen"]} for content in _mqar(data).values())
    tested = [found[MDN]["accuracy"] for found in (plain, rewriting)]
    segment = [name for name in tested[0] if name in tested[1]][-1]
    rows = []
    for mixer in sorted(plain, key=lambda mixer: -statistics.fmean(rewriting[mixer]["accuracy"][segment])):
        each = [
            ", ".join(ACCURACY.shown(value) for value in found[mixer]["accuracy"][segment])
            for found in (plain, rewriting)
        ]
        rows.append([LABELS.get(mixer, mixer), *each])
    return str(Table(f"**accuracy in % at {segment}, by seed**", ["mixer", *MQAR], rows))


def mqar_cost(data: Path) -> str:
    """How many models were trained; the time where it is recorded."""
    points = []
    for content in _mqar(data).values():
        recipe = content["recipe"]
        numbers = [len(recipe[name]) for name in ("mixers", "learning_rates", "seeds")]
        cells = numbers[0] * numbers[1] * numbers[2] * len(recipe["hidden_sizes"])
        grid = f"{numbers[0]} mixers, {numbers[1]} learning rates, {numbers[2]} seeds"
        training = recipe["training"]
        steps = f"{training['steps']} steps of {training['batch_tokens']} tokens"
        minutes = content.get("processor_minutes")
        time = f"{minutes:.0f} processor minutes" if minutes else "their time was not recorded"
        points.append(paragraph([f"{recipe['name']}: {cells} models ({grid}), {steps} each; {time}"], begin="- "))
    return "\n".join(points)


# ------------------------------------------------------------------------------------------------------------- dynamics


def closed_form(data: Path) -> str:
    found = read_results(data / "spectra.json", "spectra")["closed form against numpy.linalg.eigvals"]
    return paragraph(
        [
            f"The closed form and `numpy.linalg.eigvals` of the full transition differ by at most "
            f"{found['largest distance']:.0e} over {found['samples']} random steps"
        ]
    )


def right_half_plane(data: Path) -> str:
    end = read_results(data / "stability.json", "stability")["end"]
    return paragraph(
        [
            f"A sweep over all allowed gates finds that the right half plane ends at log mu = "
            f"{end['found by sweep']:.2f}, the closed form says {end['closed form']:.3f}"
        ]
    )


# ------------------------------------------------------------------------------------------------------------ ablations


WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}


def _ablations(data: Path) -> dict[str, Any]:
    return read_results(data / "ablations.json", "ablations")


def ablation_answer(data: Path) -> str:
    """Which rows differ from their reference, and what the paper's divergences are: two sentences."""
    rows = _ablations(data)["rows"]
    by_name = {row["row"]: row for row in rows}
    better: list[str] = []
    worse: list[str] = []
    for row in rows:
        found = difference(row, rows)
        if found is not None and found.leaves_out_zero:
            (worse if found.mean > 0 else better).append(_with_bits(row))
    full = BITS.in_words(statistics.fmean(by_name[REFERENCE]["bits per byte"]))
    number = len(by_name[REFERENCE]["bits per byte"])
    seeds = f"{WORDS.get(number, number)} seeds"
    if better or worse:
        clauses = [f"{listed(better)} {_are(better)} better"] if better else []
        clauses += [f"{listed(worse)} {_are(worse)} worse"] if worse else []
        they = "they are" if len(better + worse) > 1 else "it is"
        first = f"With {seeds}, {joined(clauses)} than the model that {they} compared with (full: {full})"
    else:
        same = [row for row in rows if reference_of(row) == REFERENCE and row["bits per byte"]]
        low, *_, high = sorted(same, key=lambda row: statistics.fmean(row["bits per byte"]))
        first = (
            f"With {seeds} no row differs significantly from the full model at {full}, neither the best, "
            f"{_with_bits(low)}, nor the worst, {_with_bits(high)}, and no hybrid from 8 layers without attention"
        )
    reported = [row for row in rows if row["paper reports"].startswith("NaN")]
    kinds: dict[str, list[str]] = {}
    for row in reported:
        kinds.setdefault(divergence(row), []).append(f'"{row["row"]}"')
    said = [f"{listed(names)} {_are(names)} one of {kind}" for kind, names in kinds.items() if kind]
    said += [f"{listed(names)} did not diverge here" for kind, names in kinds.items() if not kind]
    return paragraph([first, f"Of the divergences that the paper reports, {joined(said)}"])


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _with_bits(row: dict[str, Any]) -> str:
    return f"{row['row']} ({BITS.shown(statistics.fmean(row['bits per byte']))})"


def ablation_gap(data: Path) -> str:
    """How much of the gap to mu = 0 a faster momentum closes, and the full model here and in the study."""
    (task,) = read_results(data / "study_ablation.json", "study")["tasks"]
    seeds = {row["contestant"]: study_seed_means(row) for row in task["rows"]}
    pairs = {
        "MDN minus mu = 0": ("mdn", "mu0"),
        "MDN minus MDN (mu 10 x faster)": ("mdn", "mdn-fast"),
        "MDN (mu 10 x faster) minus mu = 0": ("mdn-fast", "mu0"),
        "MDN minus GDN": ("mdn", "gdn"),
        "MDN minus GDN with bounds": ("mdn", "gdn-bounds"),
        "GDN minus GDN with bounds": ("gdn", "gdn-bounds"),
    }
    rows = [[name, *_difference(seeds[first], seeds[second])] for name, (first, second) in pairs.items()]
    here = next(row["bits per byte"] for row in _ablations(data)["rows"] if row["row"] == REFERENCE)
    rows.append(["MDN in the study minus the full model of this page", *_difference(seeds["mdn"], here)])
    return str(Table("", ["bits per byte", "difference", "significant"], rows))


def _difference(first: list[float], second: list[float]) -> list[str]:
    found = difference_interval(first, second)
    return [f"{BITS.shown(found.mean)} ± {BITS.shown(found.half_width)}", "yes" if found.leaves_out_zero else "no"]


def ablation_cost(data: Path) -> str:
    content = _ablations(data)
    timed = [row for row in content["rows"] if "minutes" in row]
    words = f"`mdn ablate`: {content['cells']} of {content['of']} cells, one thread each"
    if timed:
        cells = sum(map(cells_of, timed))
        minutes = sum(row["minutes"] for row in timed)
        words += f"; the time of {cells} of them is recorded, {minutes:.1f} minutes together"
    return paragraph([words])

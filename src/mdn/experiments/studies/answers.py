"""What a study found, in sentences: the two that answer its question, the comparisons one by one, the paper's claim.

Every number and every verdict comes from the summary of the recorded cells. What has missing seeds is left out, but for
the question whether any model learns a task.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.contestants import CONTESTANTS
from mdn.experiments.studies.findings import FIRST, LEVEL, SECOND, UNDECIDED, Finding, findings, labels
from mdn.experiments.studies.statistics import difference_interval, is_told_apart
from mdn.experiments.studies.study import EQUAL_PARAMETERS, EQUAL_STATE, NO_BREAK, Comparison
from mdn.experiments.studies.summary import curve_by_seed, label, metric_of

Sentences = tuple[str, str]
"""without their full stops"""
MU_ZERO = Comparison("mdn", "mu0", "equal parameters")
ABLATED = tuple(entry for entry in STUDIES["ablation"].comparisons if entry.what == EQUAL_PARAMETERS.what)
SPELT_OUT = {"language": (MU_ZERO, EQUAL_PARAMETERS), "ablation": ABLATED}
"""the comparisons in an answer, by study; the others spell out that at equal parameters"""
COUNTS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


def listed(items: Sequence[str], last: str = "and") -> str:
    """ "a, b and c"."""
    return f"{', '.join(items[:-1])} {last} {items[-1]}" if len(items) > 1 else "".join(items)


def joined(clauses: Sequence[str]) -> str:
    """Clauses as one sentence: "a, b, and c"."""
    return f"{', '.join(clauses[:-1])}, and {clauses[-1]}" if len(clauses) > 1 else "".join(clauses)


def paragraph(sentences: Sequence[str], begin: str = "") -> str:
    """``begin`` stands before the first line, as wide as the indent of the others."""
    words = " ".join(f"{sentence}." for sentence in sentences)
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    text = textwrap.fill(words, 118, initial_indent=begin, subsequent_indent=" " * len(begin), **options)
    return text.replace(NO_BREAK, " ")


def answer(content: dict[str, Any]) -> str:
    """Two sentences; the second also says how much of the study is missing."""
    first, second = ANSWERS.get(content["study"], equal_parameters_and_state)(content)
    if content["cells"] < content["of"]:
        second += f", with {content['cells']} of {content['of']} cells recorded so far"
    return paragraph([first, second])


def further(content: dict[str, Any]) -> str:
    """A point per comparison that is not spelt out in the answer."""
    points = []
    for comparison in STUDIES[content["study"]].comparisons:
        found = clauses(content, comparison)
        if found and comparison not in SPELT_OUT.get(content["study"], (EQUAL_PARAMETERS,)):
            equal = comparison.what[0].upper() + comparison.what[1:]
            points.append(paragraph([f"{equal}: {joined(found)}"], begin="- "))
    return "\n".join(points) or "No further comparison is decided yet."


# --------------------------------------------------------------------------------------------- one comparison at a time


def clauses(content: dict[str, Any], comparison: Comparison) -> list[str]:
    """Who is better on which tasks, a clause per verdict: "MDN is better than GDN on the resonator (...)"."""
    first, second = labels(comparison)
    found: dict[str, list[Finding]] = {FIRST: [], SECOND: [], LEVEL: [], UNDECIDED: []}
    for finding in findings(content, comparison):
        found[finding.verdict()].append(finding)
    said = []
    if found[FIRST]:
        said.append(f"{first} is better than {second} on {_with_means(found[FIRST])}")
    if found[SECOND]:
        said.append(f"{second} is better than {first} on {_with_means(found[SECOND], swapped=True)}")
    if found[LEVEL]:
        # After one clause "the two" are named, and their numbers follow in the same order.
        pair = "the two" if len(said) == 1 else f"{first} and {second}"
        swapped = len(said) == 1 and not found[FIRST]
        said.append(f"{pair} do not differ significantly on {_with_means(found[LEVEL], swapped)}")
    return said


def _with_means(found: list[Finding], swapped: bool = False) -> str:
    means = [finding.means[::-1] if swapped else finding.means for finding in found]
    return listed(
        [f"{finding.task['phrase']} ({finding.metric.in_words(*pair)})" for finding, pair in zip(found, means)]
    )


def equal_parameters_and_state(content: dict[str, Any]) -> Sentences:
    """The answer of a study of MDN against GDN."""
    return equal_parameters(content), equal_state(content)


def equal_parameters(content: dict[str, Any]) -> str:
    found = clauses(content, EQUAL_PARAMETERS)
    return f"With equal parameters, {joined(found)}" if found else "With equal parameters nothing is decided yet"


def equal_state(content: dict[str, Any]) -> str:
    """Both comparisons at equal state in one sentence, without numbers."""
    verdicts: dict[str, list[str]] = {}
    for comparison in EQUAL_STATE:
        for finding in findings(content, comparison):
            verdicts.setdefault(finding.task["phrase"], []).append(finding.verdict())

    def on(*kind: str) -> str:
        """The tasks with these two verdicts, in either order."""
        return listed([task for task, pair in verdicts.items() if sorted(pair) == sorted(kind)])

    found = []
    for better, worse, verdict in (("MDN", "GDN", FIRST), ("GDN", "MDN", SECOND)):
        where = [f"on {on(verdict, verdict)} in both comparisons"] if on(verdict, verdict) else []
        where += [f"on {on(verdict, LEVEL)} in one of two comparisons"] if on(verdict, LEVEL) else []
        if where:
            found.append(f"{better} is better than {worse} {listed(where)}")
    if on(FIRST, SECOND):
        found.append(f"the two comparisons contradict each other on {on(FIRST, SECOND)}")
    if on(LEVEL, LEVEL):
        found.append(
            f"{'the two' if len(found) == 1 else 'MDN and GDN'} do not differ significantly on {on(LEVEL, LEVEL)}"
        )
    return f"With equal state, {joined(found)}" if found else "With equal state nothing is decided yet"


# ------------------------------------------------------------------------------------------- studies with other answers


def half_way(task: dict[str, Any], test: str, score: float) -> bool:
    """Whether a score of a test is at least half way from knowing nothing to perfect.

    Knowing nothing is chance, where the task records it, else the worst score of the metric: no right answer, the error
    of predicting zero or no change, 8 bits per byte.
    """
    metric = metric_of(task)
    nothing = task["baselines"]["chance"][test] if "chance" in task["baselines"] else metric.worst
    middle = (nothing + (1.0 if metric.higher_is_better else 0.0)) / 2
    return score == middle or metric.better(score, middle)


def learnt(task: dict[str, Any]) -> bool:
    """Whether some model, in the mean over its seeds, gets half of the way in some test."""
    scores = [(test, statistics.fmean(values)) for row in task["rows"] for test, values in row["scores"].items()]
    return any(half_way(task, test, mean) for test, mean in scores)


def state_tracking(content: dict[str, Any]) -> Sentences:
    """Who follows a state at four times the length of training, and MDN against GDN on the tasks that are learnt."""
    followed, lost = [], []
    for task in content["tasks"]:
        rows = [row for row in task["rows"] if len(row["seeds"]) == task["seeds"]]
        means = {label(row): statistics.fmean(row["scores"]["4x"]) for row in rows}
        able = {name: mean for name, mean in means.items() if half_way(task, "4x", mean)}
        if able:
            scores = listed([metric_of(task).shown(mean) for mean in able.values()])
            verb = "follow" if len(able) > 1 else "follows"
            followed.append(f"{listed(list(able))} {verb} {task['phrase']} ({scores}{NO_BREAK}%)")
        elif means:
            lost.append(task["phrase"])
    if lost:
        followed.append(f"no model follows {listed(lost, 'or')}")
    second = equal_parameters(content | {"tasks": [task for task in content["tasks"] if learnt(task)]})
    if not followed:
        return "Nothing is decided yet at four times the length of training", second
    return f"At four times the length of training, {joined(followed)}", second


def ablation(content: dict[str, Any]) -> Sentences:
    """Which rows differ from MDN."""
    found: dict[str, list[Finding]] = {FIRST: [], SECOND: [], LEVEL: [], UNDECIDED: []}
    for comparison in ABLATED:
        for finding in findings(content, comparison):
            found[finding.verdict()].append(finding)
    decided = found[FIRST] + found[SECOND] + found[LEVEL]
    if not decided:
        return "No row has all of its seeds yet", "Nothing is decided"
    metric, mdn = decided[0].metric, decided[0].means[0]

    def rows(kind: str) -> list[str]:
        ordered = sorted(found[kind], key=lambda finding: finding.means[1])
        return [f"{labels(finding.comparison)[1]} at {metric.shown(finding.means[1])}" for finding in ordered]

    better, worse = rows(SECOND), rows(FIRST)
    level = [labels(finding.comparison)[1] for finding in found[LEVEL]]
    reference = f"MDN at {metric.in_words(mdn)}"
    first = (
        f"{listed(better)} {_is(better)} better than {reference}" if better else f"no row is better than {reference}"
    )
    second = f"{listed(worse)} {_is(worse)} worse" if worse else "no row is worse"
    rest = (
        f"The other rows do not differ significantly from it: {listed(level)}"
        if level
        else "All rows differ significantly from it"
    )
    return f"With a learning rate for every row, {first}, and {second}", rest


def _is(items: Sequence[str]) -> str:
    return "are" if len(items) > 1 else "is"


def language(content: dict[str, Any]) -> Sentences:
    """MDN against mu = 0 and GDN after 4 million tokens, and whether the gap to mu = 0 lasts."""
    short = content | {"tasks": [task for task in content["tasks"] if task["name"] == "4M tokens"]}
    found = [entry for comparison in SPELT_OUT["language"] for entry in findings(short, comparison)]
    return _mdn_against(found), lasting_gap(content)


def _mdn_against(found: Sequence[Finding]) -> str:
    """MDN against several others on one task: "MDN (1.668) is better than ..., and does not differ ..."."""
    verbs = {FIRST: "is better than", SECOND: "is worse than", LEVEL: "does not differ significantly from"}
    said = []
    for verdict, verb in verbs.items():
        others = [
            f"{labels(entry.comparison)[1]} ({entry.metric.shown(entry.means[1])})"
            for entry in found
            if entry.verdict() == verdict
        ]
        said += [f"{verb} {listed(others, 'or' if verdict == LEVEL else 'and')}"] if others else []
    if not said:
        return "After 4 million tokens nothing is decided yet"
    task, mdn = found[0].task, found[0].means[0]
    return (
        f"After {task['phrase']}, with equal parameters and {COUNTS[task['seeds']]} seeds, "
        f"MDN ({found[0].metric.in_words(mdn)}) {joined(said)}"
    )


def lasting_gap(content: dict[str, Any]) -> str:
    """Does the gap to mu = 0 last? From the curves of the longest runs, after 1, 4 and 12 million tokens."""
    task = content["tasks"][-1]
    rows = {row["contestant"]: row for row in task["rows"] if len(row["seeds"]) == task["seeds"]}
    missing = [CONTESTANTS[name].label for name in ("mdn", "mu0") if name not in rows]
    if missing:
        return (
            f"Whether the gap to mu = 0 lasts is open: the runs of {listed(missing)} over 12 million tokens are missing"
        )
    mdn, mu_zero = (curve_by_seed(rows[name], task["steps"]) for name in ("mdn", "mu0"))
    steps = {round(number * task["batch_tokens"] / 1e6): number for number in mdn}
    pairs = {millions: (mdn[steps[millions]], mu_zero[steps[millions]]) for millions in (1, 4, 12)}
    metric, gaps = metric_of(task), {millions: difference_interval(*pair) for millions, pair in pairs.items()}
    shown = [f"{metric.shown(gap.mean)} ± {metric.shown(gap.half_width)}" for gap in gaps.values()]
    apart = {millions: is_told_apart(*pair) for millions, pair in pairs.items()}
    begin, end = gaps[1].mean, gaps[12].mean
    if not apart[12]:
        verdict = f"in the end the two do {'no longer' if apart[1] else 'not'} differ significantly"
    elif not apart[1]:
        ahead, behind = ("MDN", "mu = 0") if metric.better(end, 0.0) else ("mu = 0", "MDN")
        verdict = f"{ahead} ends ahead of {behind}"
    elif begin * end < 0:
        verdict = "the gap changes its sign"
    elif abs(end) < abs(begin) / 2:
        verdict = "the gap shrinks to less than half but remains"
    else:
        verdict = "the gap lasts"
    return (
        f"In runs over 12 million tokens, MDN minus mu = 0 is {listed(shown)} {metric.unit} after 1, 4 and 12 million "
        f"tokens (after 4 million the learning rate is still high): {verdict}{_against_gdn(content)}"
    )


def _against_gdn(content: dict[str, Any]) -> str:
    """The rest of that sentence: GDN at the end of the longest runs, once all its seeds are recorded."""
    last = [entry for entry in findings(content, EQUAL_PARAMETERS) if entry.task is content["tasks"][-1]]
    if not last or last[0].verdict() == UNDECIDED:
        return ""
    (finding,) = last
    level = "MDN and GDN do not differ significantly"
    says = {FIRST: "MDN ends ahead of GDN", SECOND: "GDN ends ahead of MDN", LEVEL: level}
    return f", and {says[finding.verdict()]} ({finding.metric.in_words(*finding.means)})"


ANSWERS: dict[str, Callable[[dict[str, Any]], Sentences]] = {
    "state-tracking": state_tracking,
    "ablation": ablation,
    "language": language,
}
"""by study; the others answer with ``equal_parameters_and_state``"""


# ---------------------------------------------------------------------------------------------------- further sentences


def claim(content: dict[str, Any]) -> str:
    """What the recorded comparisons say about the paper's claim."""
    by_pair = {(entry.first, entry.second): entry for entry in STUDIES[content["study"]].comparisons}
    if content["study"] == "retrieval":
        return paragraph(
            [
                _confirmed(content, EQUAL_PARAMETERS, "MDN is better than Gated DeltaNet"),
                _confirmed(content, by_pair["gdn", "gdn-bounds"], "the bounds cost Gated DeltaNet accuracy"),
                _confirmed(content, by_pair["mdn", "mu0"], "momentum helps within the bounds"),
            ]
        )
    if content["study"] == "language":
        pairs = (EQUAL_PARAMETERS, MU_ZERO)
        found = [entry for pair in pairs for entry in findings(content, pair) if entry.verdict() != UNDECIDED]
        if not found:
            return "Whether this is so here is open until the runs of MDN, GDN and mu = 0 are recorded."
        return "\n".join(paragraph([_change(finding)], begin="- ") for finding in found)
    raise ValueError(f"no sentences on the paper's claim are generated for {content['study']!r}")


def _change(finding: Finding) -> str:
    """Whether the runs of a task show a change of the bits per byte, and which changes their interval allows."""
    gap, metric = difference_interval(finding.first, finding.second), finding.metric
    first, second = labels(finding.comparison)
    shown = "no change can be shown" if finding.verdict() == LEVEL else "a change"
    allowed = f"the interval reaches from {metric.shown(gap.low)} to {metric.in_words(gap.high)}"
    return f"{first} minus {second} after {finding.task['phrase']}: {shown}; {allowed}"


def _confirmed(content: dict[str, Any], comparison: Comparison, what: str) -> str:
    """Which tasks confirm that the first of a comparison is better, and which contradict it."""
    found = findings(content, comparison)
    if all(entry.verdict() == UNDECIDED for entry in found):
        return f"Whether {what} is not decided yet"
    where = [entry.task["phrase"] for entry in found if entry.verdict() == FIRST]
    against = [entry.task["phrase"] for entry in found if entry.verdict() == SECOND]
    tasks = listed(where) if where else "no task"
    said = f"{tasks[0].upper()}{tasks[1:]} {'confirm' if len(where) > 1 else 'confirms'} that {what}"
    return f"{said}; {listed(against)} {'contradict' if len(against) > 1 else 'contradicts'} it" if against else said


def best(content: dict[str, Any]) -> str:
    """The best mean of any model by test, a sentence per task."""
    sentences = []
    for task in content["tasks"]:
        metric = metric_of(task)
        pick = max if metric.higher_is_better else min
        tests = {test: [statistics.fmean(row["scores"][test]) for row in task["rows"]] for test in _tests(task)}
        found = listed([f"{metric.shown(pick(means))} at {test}" for test, means in tests.items()])
        sentences.append(f"The best mean of any model on {task['phrase']} is {found}")
    return paragraph(sentences)


def baselines(content: dict[str, Any]) -> str:
    """In how many tests a baseline is better than every model."""
    sentences = []
    for task in content["tasks"]:
        metric = metric_of(task)
        for name, scores in task["baselines"].items():
            lost = [
                test
                for test in _tests(task)
                if not all(metric.better(scores[test], statistics.fmean(row["scores"][test])) for row in task["rows"])
            ]
            count = f"{len(scores) - len(lost)} of {len(scores)} tests"
            exceptions = f" (all but {listed(lost)})" if lost else ""
            sentences.append(f"The {name} is better than every model in {count}{exceptions}")
    return paragraph(sentences)


def _tests(task: dict[str, Any]) -> list[str]:
    return list(task["rows"][0]["scores"]) if task["rows"] else []

"""The pages of the studies: answers in two sentences, tables, overview and costs, all from recorded cells."""

import re
from pathlib import Path

import pytest

from mdn.common.results import read_results, write_results
from mdn.experiments.studies import answers, oscillation, overview, pages, retrieval
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.findings import FIRST, LEVEL, SECOND, comparison_table
from mdn.experiments.studies.overview import summarise_overview
from mdn.experiments.studies.study import EQUAL_PARAMETERS

ROOT = Path(__file__).resolve().parents[2]


def made_up(study, missing=()):
    """A summary with made-up scores: all seeds of every contestant but those ``missing``, each a little worse."""
    tasks = []
    for task in study.tasks:
        metric = task.metric
        rows = []
        for place, name in enumerate(task.contestants):
            if name in missing:
                continue
            base = metric.worst + (1 if metric.higher_is_better else -1) * (0.9 - 0.03 * place)
            values = [base + 0.001 * seed for seed in range(task.seeds)]
            tests = ("1x", "2x", "4x")
            curve = [
                {"steps": steps, "scores": {"1x": base + 0.5 / place if place else base}} for steps in task.checkpoints
            ]
            row = {
                "other_rates": {},
                "parameters": 10,
                "state_numbers": 4,
                "learning_rate": 1e-2,
                "diverged": 0,
                "seeds": list(range(task.seeds)),
            }
            scores = dict.fromkeys(tests, values)
            rows.append(row | {"contestant": name, "scores": scores, "curves": [curve] * task.seeds})
        tasks.append(
            {
                "name": task.name,
                "title": task.title,
                "phrase": task.phrase or task.name,
                "steps": task.steps,
                "batch_tokens": task.settings().get("batch_tokens"),
                "seeds": task.seeds,
                "rates": task.rates,
                "metric": vars(metric),
                "baselines": {"chance": dict.fromkeys(tests, 0.1)} if study.name == "state-tracking" else {},
                "rows": rows,
            }
        )
    cells = 9 if missing else 10
    return {"study": study.name, "cells": cells, "of": 10, "processor_minutes": 1.0, "tasks": tasks}


def sentences(text):
    return re.findall(r"\.(?=\s|$)", text)


@pytest.mark.parametrize("missing", [(), ("gdn",), ("mdn",), ("mu0", "gdn-double")], ids=lambda names: "+".join(names))
@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_an_answer_has_two_sentences_whatever_is_recorded(study, missing):
    text = answers.answer(made_up(study, missing))
    assert len(sentences(text)) == 2
    assert ";" not in text
    assert ("9 of 10 cells recorded so far" in " ".join(text.split())) == bool(missing)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_the_answer_on_a_page_has_two_sentences(study):
    text = "".join(page.read_text() for page in (ROOT / pages.PAGES).glob("*.md"))
    shown = re.search(rf"<!-- study {study.name} answer -->\n(.*?)<!-- end of study -->", text, re.DOTALL)[1]
    assert len(sentences(shown)) == 2
    assert len(" ".join(shown.split())) < 700


def test_an_answer_names_who_is_better_and_leaves_out_missing_seeds():
    row = {"parameters": 10, "state_numbers": 4, "learning_rate": 1e-2, "diverged": 0, "curves": []}
    scores = {"mdn": [0.1, 0.12, 0.11], "gdn": [0.4, 0.41, 0.39], "mdn-half": [0.4, 0.4]}
    rows = [row | {"contestant": name, "seeds": [0, 1, 2], "scores": {"1x": found}} for name, found in scores.items()]
    metric = vars(oscillation.STUDY.tasks[0].metric)
    names = {"name": "resonator", "title": "", "phrase": "the resonator"}
    task = names | {"seeds": 3, "metric": metric, "baselines": {}, "rows": rows}
    content = {"study": "oscillation", "cells": 8, "of": 9, "processor_minutes": 1.0, "tasks": [task]}
    words = " ".join(answers.answer(content).split())
    assert words == (
        "With equal parameters, MDN is better than GDN on the resonator (error 0.110 against 0.400). "
        "With equal state nothing is decided yet, with 8 of 9 cells recorded so far."
    )
    verdicts = {row[1]: row[-1] for row in comparison_table(content).rows}
    assert verdicts == {"MDN and GDN": "MDN is better", "MDN (V/2) and GDN": "seeds are missing"}


def test_clauses_list_tasks_by_verdict_with_the_better_number_first():
    content = made_up(retrieval.STUDY)
    for task, gdn in zip(content["tasks"], (0.99, 0.5, None, None)):
        for row in task["rows"]:
            if row["contestant"] == "gdn":
                mdn = task["rows"][0]["scores"]["1x"]
                row["scores"] = dict.fromkeys(row["scores"], mdn if gdn is None else [gdn] * 5)
    better, worse, level = answers.clauses(content, EQUAL_PARAMETERS)
    assert better == "MDN is better than GDN on rewriting (90.2 against 50.0\u00a0%)"
    assert worse == "GDN is better than MDN on recall (99.0 against 90.2\u00a0%)"
    assert level.startswith(
        "MDN and GDN do not differ significantly on noisy recall (90.2 against 90.2\u00a0%) and needles ("
    )


def test_further_points_leave_out_what_the_answer_spells_out():
    content = read_results(ROOT / pages.DATA / "study_oscillation.json", "study")
    assert "KDA" not in answers.answer(content)
    points = answers.further(content).split("\n- ")
    assert len(points) == len(oscillation.STUDY.comparisons) - 1
    assert all(len(sentences(point)) == 1 for point in points)
    assert "Equal parameters (KDA with and without momentum): momentum KDA" in " ".join(" ".join(points).split())


@pytest.mark.parametrize(
    ("gaps", "spread", "verdict"),
    [
        ((0.2, 0.15, 0.14), 0.001, "the gap lasts"),
        ((0.2, 0.1, 0.05), 0.001, "the gap shrinks to less than half but remains"),
        ((0.2, 0.1, -0.05), 0.001, "the gap changes its sign"),
        ((0.2, 0.1, 0.0), 0.001, "in the end the two do no longer differ significantly"),
        ((0.2, 0.1, 0.0), 0.1, "in the end the two do not differ significantly"),
        ((0.05, -0.1, -0.2), 0.1, "MDN ends ahead of mu = 0"),
        ((0.05, 0.1, 0.2), 0.1, "mu = 0 ends ahead of MDN"),
    ],
)
def test_the_language_answer_says_whether_the_gap_to_mu_0_lasts(gaps, spread, verdict):
    content = made_up(STUDIES["language"])
    longest = content["tasks"][-1]
    million = 1_000_000 // longest["batch_tokens"]
    for row in longest["rows"]:
        ahead = gaps if row["contestant"] == "mdn" else (0.0, 0.0, 0.0)
        row["curves"] = [
            [{"steps": n * million, "scores": {"1x": 2 + gap + noise}} for n, gap in zip((1, 4), ahead)]
            for noise in (0.0, spread)
        ]
        row["scores"] = {"1x": [2 + ahead[2], 2.001 + ahead[2]]}
    first, second = answers.language(content)
    assert first.startswith("After 4 million tokens of bytes, with equal parameters and two seeds, MDN (")
    shown = (
        r"{:.3f} ± 0\.\d+, {:.3f} ± 0\.\d+ and {:.3f} ± 0\.\d+ bits per byte after 1, 4 and 12 million tokens".format(
            *gaps
        )
    )
    still = r"\(after 4 million the learning rate is still high\)"
    said = rf"In runs over 12 million tokens, MDN minus mu = 0 is {shown} {still}: {verdict}"
    gdn = "MDN and GDN do not differ significantly" if gaps[2] == 0 else "(MDN|GDN) ends ahead of (MDN|GDN)"
    assert re.fullmatch(rf"{said}, and {gdn} \([12]\.\d+ against 2\.\d+\sbits per byte\)", second)
    longest["rows"] = [row for row in longest["rows"] if row["contestant"] != "gdn"]
    assert re.fullmatch(said, answers.language(content)[1])
    longest["rows"] = [row for row in longest["rows"] if row["contestant"] != "mu0"]
    assert answers.language(content)[1].endswith("the runs of mu = 0 over 12 million tokens are missing")


def test_the_language_answer_compares_mdn_with_both_in_one_clause():
    content = made_up(STUDIES["language"])
    rows = {row["contestant"]: row for row in content["tasks"][0]["rows"]}
    for name, scores in {"mdn": [1.66, 1.68], "mu0": [1.665, 1.673], "gdn": [1.60, 1.66]}.items():
        rows[name]["scores"] = {"held out": scores}
    first, _ = answers.language(content)
    assert first.replace("\u00a0", " ") == (
        "After 4 million tokens of bytes, with equal parameters and two seeds, MDN (1.670 bits per byte) "
        "does not differ significantly from mu = 0 (1.669) or GDN (1.630)"
    )
    rows["mdn"]["scores"], rows["gdn"]["scores"] = {"held out": [1.67, 1.671]}, {"held out": [1.5, 1.501]}
    first, _ = answers.language(content)
    assert first.endswith("is worse than GDN (1.500), and does not differ significantly from mu = 0 (1.669)")


def test_the_ablation_answer_names_the_rows_that_differ():
    content = made_up(STUDIES["ablation"])
    for place, row in enumerate(content["tasks"][0]["rows"]):
        level = {0: 2.8, 1: 2.6, 2: 3.1}.get(place, 2.8)
        row["scores"] = {"held out": [level + 0.01 * seed for seed in range(5)]}
    first, second = answers.ablation(content)
    assert first.replace("\u00a0", " ") == (
        "With a learning rate for every row, mu = 0 at 2.620 is better than MDN at 2.820 bits per byte, "
        "and GDN at 3.120 is worse"
    )
    assert second.startswith("The other rows do not differ significantly from it: GDN with bounds, ")
    assert second.endswith(" and eta = 2 sigmoid")


def test_the_paper_claims_are_judged_by_the_comparisons():
    content = made_up(retrieval.STUDY)
    words = " ".join(answers.claim(content).split())
    assert words.startswith(
        "Recall, rewriting, noisy recall and needles confirm that MDN is better than Gated DeltaNet."
    )
    assert len(sentences(words)) == 3
    for task in content["tasks"]:
        task["rows"][0]["scores"] = {"1x": [0.01 * seed for seed in range(5)]}
    words = " ".join(answers.claim(content).split())
    assert words.startswith(
        "No task confirms that MDN is better than Gated DeltaNet; recall, rewriting, noisy recall and needles "
        "contradict it."
    )
    assert "open" in answers.claim(made_up(STUDIES["language"], ("gdn", "mu0")))
    points = answers.claim(made_up(STUDIES["language"])).split("\n- ")
    assert [point.split(" after")[0].removeprefix("- ") for point in points] == 2 * ["MDN minus GDN"] + 2 * [
        "MDN minus mu = 0"
    ]
    interval = r"the interval reaches from -?\d+\.\d+ to -?\d+\.\d+ bits per byte\."
    for millions, point in zip((4, 12), points):
        said = rf"MDN minus GDN after {millions} million tokens of bytes: a change; {interval}"
        assert re.fullmatch(said, " ".join(point.removeprefix("- ").split()))
    scattered = made_up(STUDIES["language"])
    scattered["tasks"][0]["rows"][0]["scores"] = {"1x": [1.0, 2.0]}
    words = " ".join(answers.claim(scattered).split())
    assert re.match(rf"- MDN minus GDN after 4 million .*: no change can be shown; {interval}", words)
    with pytest.raises(ValueError, match="'oscillation'"):
        answers.claim(made_up(oscillation.STUDY))


def test_a_baseline_is_counted_where_it_beats_every_model():
    content = made_up(STUDIES["forecasting"])
    (task,) = content["tasks"]
    task["baselines"] = {"autoregression": {"1x": 0.01, "2x": 0.01, "4x": 2.0}}
    assert answers.baselines(content) == "The autoregression is better than every model in 2 of 3 tests (all but 4x)."
    assert answers.best(content) == (
        "The best mean of any model on the four series is 0.102 at 1x, 0.102 at 2x and 0.102 at 4x."
    )


def test_summaries_are_those_of_the_recorded_cells(tmp_path):
    kept = [*(ROOT / pages.DATA).glob("study_*.json"), *(ROOT / pages.DATA).glob(pages.OVERVIEW)]
    written = pages.write_summaries(ROOT / pages.DATA, tmp_path)
    assert {path.name for path in kept} == {path.name for path in written}
    for path in kept:
        assert path.read_text() == (tmp_path / path.name).read_text(), "make figures was not run"


def test_the_overview_compares_errors_where_all_seeds_are_there(recorded):
    (row,) = summarise_overview([recorded])["rows"]
    assert (row["task"], row["first"], row["second"], row["seeds"]) == ("resonator", "mdn", "gdn", 2)
    assert row["learnt"]
    assert row["ratio"] == pytest.approx((0.1 * 0.3) ** 0.5 / 0.5)
    assert row["low"] < row["ratio"] < row["high"]
    recorded["tasks"][0]["seeds"] = 3
    assert summarise_overview([recorded])["rows"] == []


def test_the_overview_says_in_words_what_the_pages_say():
    def rows(phrase, learnt, *verdicts, seeds=5):
        names = {"study": "retrieval", "task": phrase, "phrase": phrase, "learnt": learnt, "seeds": seeds}
        intervals = {FIRST: (0.2, 0.6), SECOND: (1.2, 1.6), LEVEL: (0.8, 1.2)}
        return [
            names | pair._asdict() | {"verdict": verdict, "ratio": (low + high) / 2, "low": low, "high": high}
            for pair, verdict, (low, high) in zip(overview.COMPARISONS, verdicts, map(intervals.get, verdicts))
        ]

    found = [
        *rows("the resonator", True, FIRST, FIRST, FIRST),
        *rows("recall", True, FIRST, LEVEL, LEVEL),
        *rows("rewriting", True, SECOND, LEVEL, SECOND),
        *rows("parity", True, LEVEL, seeds=2),
        *rows("A5", False, LEVEL, LEVEL, LEVEL),
        *rows("S3", False, LEVEL, LEVEL, LEVEL),
    ]
    points = " ".join(overview.in_words({"rows": found}).split()).removeprefix("- ").split(" - ")
    assert points == [
        "The resonator: MDN's error is lower than GDN's at equal parameters and at equal state.",
        "Recall: MDN's error is lower than GDN's at equal parameters, but not at equal state.",
        "Rewriting: MDN's error is higher than GDN's at equal parameters, and in one of the two comparisons at equal "
        "state.",
        "Parity (two seeds): no measurable difference at equal parameters (equal state was not compared).",
        "No model learns A5 or S3, so these tasks are inconclusive.",
    ]
    found[3] |= {"verdict": LEVEL}
    said = " ".join(overview.in_words({"rows": found}).split())
    assert (
        "On recall at equal parameters (MDN / GDN) the interval in the figure leaves out 1, but the test of the page"
        in said
    )
    drawn = [label.get_text() for label in overview.draw({"rows": found}).axes[0].get_yticklabels()]
    assert drawn[0] == "retrieval: the resonator"
    assert drawn[3] == "retrieval: parity (two seeds)"
    assert drawn[-1] == "retrieval: S3 (not learnt)"


def test_a_task_is_learnt_when_a_model_gets_half_of_the_way_in_one_test():
    (task,) = made_up(STUDIES["state-tracking"].only(["parity"]))["tasks"]
    for best, learnt in ((0.54, False), (0.56, True)):  # chance is 0.1, half of the way 0.55
        for row in task["rows"]:
            row["scores"] = {"1x": [0.1, 0.1], "2x": [0.1, 0.1], "4x": [0.2, 0.2]}
        task["rows"][-1]["scores"]["2x"] = [best - 0.1, best + 0.1]
        assert answers.learnt(task) == learnt


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs/experiments.md", *sorted((ROOT / pages.PAGES).glob("*.md"))]
)
def test_the_generated_parts_of_a_page_are_current(page):
    text = page.read_text()
    assert pages.updated(text, ROOT / pages.DATA) == text, "make figures was not run"


@pytest.mark.parametrize("what", ["answer", "figure", "comparisons", "tables", "cost"])
def test_every_study_has_its_parts_on_a_page(what):
    text = "".join(page.read_text() for page in (ROOT / pages.PAGES).glob("*.md"))
    assert [name for name in STUDIES if f"<!-- study {name} {what} -->" not in text] == []


def test_the_costs_have_the_measured_hours_beside_the_estimates(tmp_path):
    content = made_up(STUDIES["forecasting"]) | {"processor_minutes": 240.0}
    write_results(tmp_path / "study_forecasting.json", "study", content)
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in pages.costs(tmp_path).splitlines()
    }
    assert rows["forecasting"] == ["forecasting", "40", "0.1", "10", "2.0"]
    assert rows["language"][-2:] == ["0", "–"]
    assert rows["all"][-2:] == ["10", "2.0"]


def test_all_studies_fit_into_five_hours_of_two_cores():
    assert sum(study.whole().seconds for study in STUDIES.values()) <= 5 * 2 * 3600

"""Studies: cells, the choice of the learning rate, resuming, statistics, summaries and the command."""

import dataclasses
import re
import time
from pathlib import Path

import pytest
import scipy.stats
import torch

from mdn.cli import main
from mdn.common.results import read_results, write_results
from mdn.experiments import grid
from mdn.experiments.studies import answers, oscillation, overview, pages, retrieval
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.contestants import CONTESTANTS, contestant
from mdn.experiments.studies.findings import comparison_table
from mdn.experiments.studies.overview import summarise_overview
from mdn.experiments.studies.statistics import difference_interval, is_told_apart, mean_interval, t_quantile
from mdn.experiments.studies.study import EQUAL_PARAMETERS, TUNING_SEED, Study, StudyCell, train_study_cell
from mdn.experiments.studies.summary import draw, mean_curve, seed_means, summarise, tables

ROOT = Path(__file__).resolve().parents[2]


def tiny(name="resonator", **changes):
    """A study of one task, with runs of four steps."""
    task = dataclasses.replace(
        oscillation.STUDY.task(name), contestants=("mdn", "gdn"), seeds=2, steps=4, examples=2, **changes
    )
    return Study("tiny", "Does it run?", (task,))


def record(study, out, cell, value, **more):
    """A recorded cell with the same score in every test."""
    facts = {"parameters": 10, "state_numbers": 4, "diverged_at": None, "curve": [], "processor_seconds": 30.0}
    result = {"settings": cell.settings(), "scores": {"1x": value, "2x": value}, "baselines": {}, **facts, **more}
    write_results(grid.cell_path(out / study.name, cell), "cell", result)


# --------------------------------------------------------------------------------------------------------- statistics


def test_quantiles_are_students():
    for degrees in (1, 2, 4, 9, 30):
        assert t_quantile(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), abs=1e-3)
    assert t_quantile(1000) == pytest.approx(scipy.stats.t.ppf(0.975, 1000), rel=0.01)


def test_the_interval_of_a_mean_is_scipys():
    values = [0.1, 0.4, 0.2, 0.35, 0.15]
    low, high = scipy.stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=scipy.stats.sem(values))
    found = mean_interval(values)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert mean_interval([0.3]).half_width == float("inf")


def test_two_models_are_told_apart_when_welchs_test_says_so():
    level = [0.50, 0.55, 0.45, 0.52, 0.48]
    near, far = [0.53, 0.60, 0.47, 0.50, 0.58], [0.70, 0.74, 0.66, 0.71, 0.69]
    for other in (near, far):
        p = scipy.stats.ttest_ind(level, other, equal_var=False).pvalue
        assert is_told_apart(level, other) == (p < 0.05)
    assert difference_interval(far, level).mean == pytest.approx(0.2)
    assert not is_told_apart([0.1], [0.9])


# ---------------------------------------------------------------------------------------------------------- the grids


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_every_contestant_of_a_study_exists_and_every_cell_has_its_own_name(study, tmp_path):
    cells = [cell for task in study.tasks if task.rates_from is None for cell in study.tuning_cells(task, tmp_path)]
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(task.seeds >= (2 if study.name == "language" else 5) for task in study.tasks)
    assert all(task.seeds <= TUNING_SEED for task in study.tasks)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_contestants_of_one_figure_have_different_colours_and_labels(study):
    shown = [CONTESTANTS[name] for name in dict.fromkeys(name for task in study.tasks for name in task.contestants)]
    assert len({entry.colour for entry in shown}) == len({entry.label for entry in shown}) == len(shown)


def test_half_the_columns_give_mdn_the_state_of_a_first_order_rule():
    task = retrieval.STUDY.task("recall")
    found = {}
    for name in ("mdn", "mdn-half", "gdn", "gdn-double", "mu0"):
        cell = StudyCell(dataclasses.replace(task, steps=1), contestant(name), 1e-3, 0)
        found[name] = train_study_cell(dataclasses.replace(cell, task=_untested(cell.task)))
    state = {name: result["state_numbers"] for name, result in found.items()}
    assert state["mdn"] == state["gdn-double"] == 2 * state["gdn"]
    assert state["mdn-half"] == state["gdn"] == state["mu0"]
    size = {name: result["parameters"] for name, result in found.items()}
    assert size["gdn"] == pytest.approx(size["mdn"], rel=0.02)
    assert size["mu0"] == pytest.approx(size["mdn"], rel=0.02)


def _untested(task):
    class Untested(type(task)):
        def test(self, model):
            return {}

    return Untested(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


def test_a_cell_gives_the_same_result_again():
    task = tiny().tasks[0]
    first, again = (train_study_cell(StudyCell(task, contestant("mdn"), 1e-2, 3)) for _ in range(2))
    other = train_study_cell(StudyCell(task, contestant("mdn"), 1e-2, 4))
    assert first["scores"] == again["scores"] != other["scores"]
    assert first["losses"] == again["losses"]
    assert first["made with"]["torch"] == torch.__version__
    assert first["made with"]["threads"] == torch.get_num_threads()


def test_the_learning_rate_is_chosen_on_the_tuning_seed_alone(tmp_path):
    study = tiny(rates=(1e-3, 1e-2))
    (task,) = study.tasks
    assert study.reported_cells(task, tmp_path) == []
    for name, scores in {"mdn": (0.3, 0.2), "gdn": (0.1, 0.4)}.items():
        for rate, score in zip(task.rates, scores):
            record(study, tmp_path, StudyCell(task, contestant(name), rate, TUNING_SEED), score)
    # A reported seed that would have preferred the other rate changes nothing.
    record(study, tmp_path, StudyCell(task, contestant("mdn"), 1e-3, 0), 0.0)
    assert study.chosen_rates(task, tmp_path) == {"mdn": 1e-2, "gdn": 1e-3}
    cells = study.reported_cells(task, tmp_path)
    assert [(cell.contestant.name, cell.learning_rate, cell.seed) for cell in cells] == [
        ("mdn", 1e-2, 0), ("gdn", 1e-3, 0), ("mdn", 1e-2, 1), ("gdn", 1e-3, 1)
    ]  # fmt: skip


def test_of_four_rates_the_neighbour_of_the_better_middle_one_is_tried_too(tmp_path):
    study = tiny(rates=(1e-3, 3e-3, 1e-2, 3e-2))
    (task,) = study.tasks

    def tried():
        return [cell.learning_rate for cell in study.tuning_cells(task, tmp_path) if cell.contestant.name == "mdn"]

    assert tried() == [3e-3, 1e-2]
    for rate, error in ((3e-3, 0.3), (1e-2, 0.2)):
        record(study, tmp_path, StudyCell(task, contestant("mdn"), rate, TUNING_SEED), error)
    assert tried() == [3e-3, 1e-2, 3e-2]
    assert study.chosen_rates(task, tmp_path) == {}
    record(study, tmp_path, StudyCell(task, contestant("mdn"), 3e-2, TUNING_SEED), 0.1)
    assert study.chosen_rates(task, tmp_path) == {"mdn": 3e-2}


def test_several_tuning_seeds_decide_by_their_mean_and_only_once_all_are_there(tmp_path):
    study = tiny(rates=(1e-3, 3e-3, 1e-2, 3e-2), tuning_seeds=2, tuning_steps=2)
    (task,) = study.tasks

    def tried():
        mine = [cell for cell in study.tuning_cells(task, tmp_path) if cell.contestant.name == "mdn"]
        return [(cell.learning_rate, cell.seed) for cell in mine]

    def record_rate(rate, *errors):
        for number, error in enumerate(errors):
            cell = StudyCell(task, contestant("mdn"), rate, TUNING_SEED + number)
            assert cell.steps == 2
            record(study, tmp_path, cell, error)

    middle = [(rate, TUNING_SEED + number) for rate in (3e-3, 1e-2) for number in (0, 1)]
    record_rate(3e-3, 0.2, 0.2)
    record_rate(1e-2, 0.1)
    assert tried() == middle
    # The first tuning seed prefers 1e-2, the mean 3e-3.
    record_rate(1e-2, 0.1, 0.4)
    assert tried() == [(1e-3, TUNING_SEED), (1e-3, TUNING_SEED + 1), *middle]
    record_rate(1e-3, 0.0)
    assert study.chosen_rates(task, tmp_path) == {}
    assert all(not entry["rows"] for entry in summarise(study, tmp_path)["tasks"])
    record_rate(1e-3, 0.0, 0.5)
    assert study.chosen_rates(task, tmp_path) == {"mdn": 3e-3}
    assert study.reported_cells(task, tmp_path)[0].steps == 4
    progress = study.progress(tmp_path)
    assert (progress.cells, progress.of) == (6, 2 * (3 * 2 + 2))
    assert progress.seconds_left == pytest.approx(task.seconds * (2 * (3 + 2) - 3))


def test_tuning_seeds_do_not_make_recorded_cells_stale():
    (task,) = tiny().tasks
    more = dataclasses.replace(task, tuning_seeds=3)
    assert (
        StudyCell(task, contestant("mdn"), 1e-2, 0).settings() == StudyCell(more, contestant("mdn"), 1e-2, 0).settings()
    )


def test_a_study_runs_only_what_is_missing(tmp_path, in_this_process):
    study = tiny(rates=(1e-2,))
    study.run(tmp_path, 1)
    assert len(in_this_process) == study.progress(tmp_path).cells == study.progress(tmp_path).of == 6
    removed = study.reported_cells(study.tasks[0], tmp_path)[1]
    grid.cell_path(tmp_path / "tiny", removed).unlink()
    in_this_process.clear()
    study.run(tmp_path, 1)
    assert in_this_process == [removed.name]


def test_a_time_limit_begins_no_cell_that_would_end_after_it(tmp_path, in_this_process):
    study = tiny(rates=(1e-2,), seconds=60.0)
    study.run(tmp_path, 1, grid.TimeLimit(time.time() + 30))
    assert study.progress(tmp_path).cells == 0
    assert study.progress(tmp_path).seconds_left == pytest.approx(6 * 60)
    study.run(tmp_path, 1, grid.TimeLimit(time.time() + 600))
    assert study.progress(tmp_path).cells == 6


def test_a_part_of_a_study_has_the_cells_of_the_whole(tmp_path, in_this_process):
    whole = tiny(rates=(1e-2,))
    whole.only(["resonator"], ["gdn"]).run(tmp_path, 1)
    assert whole.progress(tmp_path).cells == 3
    whole.run(tmp_path, 1)
    assert [name.split("-")[1] for name in in_this_process] == ["gdn"] * 3 + ["mdn"] * 3
    with pytest.raises(ValueError, match="no task 'resonater'"):
        whole.only(["resonater"])
    with pytest.raises(ValueError, match="no contestant 'mdnn'"):
        whole.only([], ["mdnn"])


def test_a_longer_task_takes_over_the_rates_of_another(tmp_path):
    short = tiny(rates=(1e-3, 1e-2)).tasks[0]
    longer = dataclasses.replace(short, name="longer", steps=8, rates_from=short, contestants=("mdn",))
    study = Study("two", "", (short, longer))
    for rate, score in ((1e-3, 0.1), (1e-2, 0.2)):
        record(study, tmp_path, StudyCell(short, contestant("mdn"), rate, TUNING_SEED), score)
    cells = study.reported_cells(longer, tmp_path)
    assert {(cell.name, cell.steps) for cell in cells} == {
        ("longer-mdn-lr0.001-seed0", 8), ("longer-mdn-lr0.001-seed1", 8)
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- what was found


@pytest.fixture
def recorded(tmp_path):
    """Two contestants with two seeds: 0.1 and 0.3, 0.5 and 0.5."""
    study = tiny(rates=(1e-2,))
    (task,) = study.tasks
    for name, scores in {"mdn": (0.1, 0.3), "gdn": (0.5, 0.5)}.items():
        for seed, score in ((TUNING_SEED, 0.9), *enumerate(scores)):
            record(study, tmp_path, StudyCell(task, contestant(name), 1e-2, seed), score)
    return summarise(study, tmp_path)


def test_a_summary_holds_every_seed_and_leaves_the_tuning_seed_out(recorded):
    (task,) = recorded["tasks"]
    assert [seed_means(row) for row in task["rows"]] == [[0.1, 0.3], [0.5, 0.5]]
    assert (recorded["cells"], recorded["of"]) == (6, 6)
    assert recorded["processor_minutes"] == 3.0


def test_cells_of_different_texts_are_not_summarised_together(tmp_path):
    study = tiny(rates=(1e-2,))
    (task,) = study.tasks
    for seed, size in ((TUNING_SEED, 1000), (0, 1000), (1, 1001)):
        cell = StudyCell(task, contestant("mdn"), 1e-2, seed)
        record(study, tmp_path, cell, 0.5, **{"made with": {"corpus bytes": size}})
    message = (
        r"'resonator' were trained on different texts: .*seed100 on 1,000 corpus bytes, .*seed1 on 1,001; .*Python"
    )
    with pytest.raises(ValueError, match=message):
        summarise(study, tmp_path)


def test_a_table_gives_means_intervals_and_seeds_best_first(recorded):
    (table,) = tables(recorded)
    assert [row[0] for row in table.rows] == ["MDN", "GDN"]
    assert table.rows[0][-2:] == ["0.200 ± 1.271", "0.100, 0.300"]
    assert table.header == ["model", "state", "parameters", "rate", "1x", "2x", "mean", "by seed"]


def test_a_figure_names_every_contestant(recorded):
    fig = draw(recorded)
    words = [text.get_text() for axis in fig.axes for text in axis.get_yticklabels()]
    assert words == [CONTESTANTS["mdn"].label, CONTESTANTS["gdn"].label]


def test_a_task_with_checkpoints_shows_how_far_apart_its_models_are_over_the_tokens(recorded):
    (task,) = recorded["tasks"]
    for row, halfway in zip(task["rows"], (0.5, 0.9)):
        row["curves"] = [[{"steps": 2, "scores": {"1x": halfway, "2x": halfway}}]] * 2
    assert mean_curve(task["rows"][0], 4) == {2: 0.5, 4: pytest.approx(0.2)}
    (axis,) = [axis for axis in draw(recorded).axes if axis.get_xlabel() == "million tokens"]
    gaps = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    assert gaps == {"MDN": [0, 0], "GDN": [pytest.approx(0.4), pytest.approx(0.3)]}


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command_runs_a_quick_study_and_reads_it_again(tmp_path, capsys, in_this_process):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    options = ["--quick", "--out", str(out), "--processes", "1"]
    assert main(["study", "forecasting", *options, "--json", str(summary), "--plot", str(tmp_path / "f.png")]) == 0
    shown = capsys.readouterr().out
    assert "0 of 4 cells recorded" in shown
    assert "4 of 4 cells recorded" in shown
    assert "| autoregression |" in shown
    assert read_results(summary, "study")["cells"] == 4
    assert (tmp_path / "f.svg").is_file()
    assert main(["study", "forecasting", *options, "--limit-minutes", "0"]) == 0
    assert "4 of 4 cells recorded" in capsys.readouterr().out


def test_the_list_names_every_study_and_trains_nothing(tmp_path, capsys):
    assert main(["study", "--list", "--out", str(tmp_path)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(STUDIES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [(["oscilation"], "oscillation"), ([], "mdn study --list"), (["all", "--json", "x.json"], "one study")],
)
def test_wrong_arguments_are_refused_by_name(words, message, capsys):
    assert main(["study", *words]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- the pages


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
    assert level.startswith("MDN and GDN cannot be told apart on noisy recall (90.2 against 90.2\u00a0%) and needles (")


def test_further_points_leave_out_what_the_answer_spells_out():
    content = read_results(ROOT / pages.DATA / "study_oscillation.json", "study")
    assert "KDA" not in answers.answer(content)
    points = answers.further(content).split("\n- ")
    assert len(points) == len(oscillation.STUDY.comparisons) - 1
    assert all(len(sentences(point)) == 1 for point in points)
    assert "Equal parameters, a decay for every channel: momentum KDA" in " ".join(points[2].split())


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((0.2, 0.15, 0.14), "so that it lasts"),
        ((0.2, 0.1, 0.05), "so that it shrinks to less than half but remains"),
        ((0.2, 0.1, -0.05), "so that it changes its sign"),
        ((0.2, 0.1, 0.0), "so that it can no longer be told from zero"),
    ],
)
def test_the_language_answer_says_whether_the_gap_to_mu_0_lasts(gaps, verdict):
    content = made_up(STUDIES["language"])
    longest = content["tasks"][-1]
    million = 1_000_000 // longest["batch_tokens"]
    for row in longest["rows"]:
        ahead = gaps if row["contestant"] == "mdn" else (0.0, 0.0, 0.0)
        row["curves"] = [[{"steps": n * million, "scores": {"1x": 2 + gap}} for n, gap in zip((1, 4), ahead)]] * 2
        row["scores"] = {"1x": [2 + ahead[2], 2.001 + ahead[2]]}
    first, second = answers.language(content)
    assert first.startswith("With equal parameters, ")
    shown = f"{gaps[0]:.3f} after 1 million, {gaps[1]:.3f} after 4 million and {gaps[2]:.3f} after 12 million tokens"
    assert second == f"In bits per byte, MDN minus mu = 0 is {shown}, {verdict}"
    longest["rows"] = [row for row in longest["rows"] if row["contestant"] != "mu0"]
    assert answers.language(content)[1].endswith("the runs of mu = 0 over 12 million tokens are missing")


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
    assert second.startswith("The other rows cannot be told apart from it: GDN with bounds, ")
    assert second.endswith(" and eta = 2 sigmoid")


def test_the_paper_claims_are_judged_by_the_comparisons():
    words = " ".join(answers.claim(made_up(retrieval.STUDY)).split())
    assert words.startswith(
        "That MDN is better than Gated DeltaNet is confirmed on recall, rewriting, noisy recall and needles."
    )
    assert len(sentences(words)) == 3
    assert "open" in answers.claim(made_up(STUDIES["language"], ("gdn",)))
    assert "not confirmed: MDN is better than GDN" in answers.claim(made_up(STUDIES["language"]))
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


def test_the_overview_says_in_words_what_the_intervals_say():
    def rows(phrase, learnt, *intervals):
        names = {"study": "retrieval", "task": phrase, "phrase": phrase, "learnt": learnt, "seeds": 5}
        return [
            names | pair._asdict() | {"ratio": (low + high) / 2, "low": low, "high": high}
            for pair, (low, high) in zip(overview.COMPARISONS, intervals)
        ]

    lower, higher, same = (0.2, 0.6), (1.2, 1.6), (0.8, 1.2)
    found = [
        *rows("the resonator", True, lower, lower, lower),
        *rows("noisy recall", True, lower, same, same),
        *rows("rewriting", True, higher, same, higher),
        *rows("parity", True, same),
        *rows("A5", False, same, same, same),
    ]
    assert " ".join(overview.in_words({"rows": found}).split()) == (
        "Momentum lowers the error on the resonator at equal parameters and at equal state. "
        "It lowers the error on noisy recall at equal parameters, not at equal state. "
        "It raises the error on rewriting at equal parameters, and in one of the two comparisons at equal state. "
        "It makes no measurable difference on parity at equal parameters (equal state is not recorded). "
        "No model learns A5, so that these tasks decide nothing."
    )
    drawn = [label.get_text() for label in overview.draw({"rows": found}).axes[0].get_yticklabels()]
    assert drawn[0] == "retrieval: the resonator"
    assert drawn[-1] == "retrieval: A5 (not learnt)"


def test_a_task_is_learnt_when_a_model_gets_half_of_the_way_in_one_test():
    (task,) = made_up(STUDIES["state-tracking"].only(["parity"]))["tasks"]
    for best, learnt in ((0.54, False), (0.56, True)):  # chance is 0.1, half of the way 0.55
        for row in task["rows"]:
            row["scores"] = {"1x": [0.1, 0.1], "2x": [0.1, 0.1], "4x": [0.2, 0.2]}
        task["rows"][-1]["scores"]["2x"] = [best - 0.1, best + 0.1]
        assert overview.learnt(task) == learnt


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

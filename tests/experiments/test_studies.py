"""Studies: cells, the choice of the learning rate, resuming, statistics, summaries and the command."""

import dataclasses
import time

import pytest
import scipy.stats
import torch

from mdn.cli import main
from mdn.common.results import read_results
from mdn.experiments import grid
from mdn.experiments.studies import retrieval
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.contestants import CONTESTANTS, contestant
from mdn.experiments.studies.statistics import (
    difference_interval,
    is_told_apart,
    mean_interval,
    permutation_p,
    t_quantile,
)
from mdn.experiments.studies.study import TUNING_SEED, Study, StudyCell, train_study_cell
from mdn.experiments.studies.summary import curve_by_seed, draw, rates_table, seed_means, summarise, tables
from study_cases import record, tiny

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


def mean_gap(first, second, axis):
    return abs(first.mean(axis=axis) - second.mean(axis=axis))


def test_p_is_that_of_scipys_exact_permutation_test():
    level = [0.50, 0.55, 0.45, 0.52, 0.48]
    for other in ([0.53, 0.60, 0.47, 0.50, 0.58], [0.70, 0.74, 0.66, 0.71, 0.69], [0.1, 0.2, 0.9, 0.95]):
        expected = scipy.stats.permutation_test((level, other), mean_gap, alternative="greater").pvalue
        assert permutation_p(level, other) == pytest.approx(expected)
        assert is_told_apart(level, other) == (expected < 0.05)
    assert permutation_p(level, level) == 1
    assert permutation_p(level, [0.1, 0.2, 0.3]) is None


def test_models_are_told_apart_if_every_seed_of_one_is_better_however_far_a_failure_lies():
    learnt, mostly_failed = [0.96, 0.965, 0.97, 0.966, 0.968], [0.95, 0.94, 0.1, 0.9, 0.3]
    assert not difference_interval(learnt, mostly_failed).leaves_out_zero
    assert is_told_apart(learnt, mostly_failed)


def test_two_seeds_are_told_apart_when_welchs_test_says_so():
    for other in ([0.45, 0.60], [0.70, 0.71]):
        p = scipy.stats.ttest_ind([0.50, 0.51], other, equal_var=False).pvalue
        assert is_told_apart([0.50, 0.51], other) == (p < 0.05)
    assert difference_interval([0.7, 0.8], [0.5, 0.6]).mean == pytest.approx(0.2)
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


def test_reported_seeds_at_another_rate_are_shown_beside_the_chosen_one(tmp_path, in_this_process):
    study = tiny(rates=(1e-3, 1e-2))
    (task,) = study.tasks
    for rate, score in ((1e-3, 0.1), (1e-2, 0.2)):
        for seed in (TUNING_SEED, 0, 1):
            record(study, tmp_path, StudyCell(task, contestant("mdn"), rate, seed), score)
    study.only([], ["mdn"]).run_at(1e-2, tmp_path, 1)
    assert in_this_process == []
    found = summarise(study, tmp_path)
    assert seed_means(found["tasks"][0]["rows"][0]) == [0.1, 0.1]
    assert rates_table(found).rows == [
        ["resonator", "MDN", "0.001", "0.100", "0.100 ± 0.000", "0.01", "0.200", "0.200 ± 0.000", "0.200, 0.200"]
    ]
    study.run_at(1e-3, tmp_path, 1)
    assert in_this_process == ["resonator-gdn-lr0.001-seed0", "resonator-gdn-lr0.001-seed1"]
    with pytest.raises(
        ValueError, match=r"0\.5 is not a learning rate of 'resonator'; expected one of \[0.001, 0.01\]"
    ):
        study.check_rate(0.5)


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
    assert curve_by_seed(task["rows"][0], 4) == {2: [0.5, 0.5], 4: [pytest.approx(0.1), pytest.approx(0.3)]}
    (axis,) = [axis for axis in draw(recorded).axes if axis.get_xlabel() == "million tokens"]
    gaps = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    assert gaps == {"MDN": [0, 0], "GDN": [pytest.approx(-0.4), pytest.approx(-0.3)]}


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
    [
        (["oscilation"], "oscillation"),
        ([], "mdn study --list"),
        (["all", "--json", "x.json"], "one study"),
        (["oscillation", "--rate", "7"], "7 is not a learning rate of"),
    ],
)
def test_wrong_arguments_are_refused_by_name(words, message, capsys):
    assert main(["study", *words]) == 2
    assert message in capsys.readouterr().err

"""Cells, the grid over processes, resuming, the choice of the learning rate, and the report."""

import pytest
import torch

from mdn.cli import main
from mdn.common.plots import save_figure
from mdn.common.results import read_results
from mdn.experiments import grid
from mdn.experiments.mqar import batches, load_mqar_recipe, train_and_test
from mdn.experiments.mqar_results import choose, draw, spread, tables
from mdn.models import MomentumDeltaNetForCausalLM

TINY = """
name: tiny
task: {vocab_size: 64}
train: [{length: 16, pairs: 2, examples: 40}]
test: [{length: 16, pairs: 2, examples: 20}, {length: 32, pairs: 4, examples: 10}]
model: {num_hidden_layers: 2, num_heads: 2, head_dim: 8, expand_v: 1, use_mlp: false, tie_word_embeddings: true}
mixers: {linear_attention: {}, attention: {}}
hidden_sizes: [16]
learning_rates: [1e-2]
seeds: [0, 1]
training: {epochs: 2, batch_size: 16}
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_an_epoch_shows_every_example_once_and_a_step_shows_fresh_ones(recipe_file):
    recipe = load_mqar_recipe(recipe_file)
    shown = [tuple(row) for examples in batches(recipe, seed=0) for row in examples.inputs.tolist()]
    assert len(shown) == 80
    assert len(set(shown)) == 40
    assert recipe.total_steps == 6
    fresh = load_mqar_recipe(recipe_file, ["training={steps: 5, batch_tokens: 64}"])
    shown = [tuple(row) for examples in batches(fresh, seed=0) for row in examples.inputs.tolist()]
    assert len(shown) == len(set(shown)) == 5 * 4


def test_a_mixer_learns_the_easiest_segment(recipe_file):
    """Two pairs among a small vocabulary: far above the chance of 1/32 after a few hundred small steps."""
    overrides = ["task.vocab_size=32", "training={steps: 300, batch_tokens: 512}", "hidden_sizes=[32]"]
    recipe = load_mqar_recipe(recipe_file, [*overrides, "mixers={gated_deltanet: {}}", "seeds=[0]"])
    result = train_and_test(recipe.cells()[0])
    assert result["accuracy"]["16:2"] > 0.5
    assert result["losses"][-1][1] < result["losses"][0][1] / 2


def test_the_grid_runs_only_the_cells_that_are_missing(recipe_file, tmp_path, in_this_process):
    out, cells = tmp_path / "out", load_mqar_recipe(recipe_file).cells()
    first = grid.run_grid(cells, train_and_test, out, 1, "tiny")
    names = [cell.name for cell in cells]
    assert sorted(path.stem for path in (out / "cells").glob("*.json")) == sorted(names)
    grid.cell_path(out, cells[2]).unlink()
    in_this_process.clear()
    again = grid.run_grid(cells, train_and_test, out, 1, "tiny")
    assert in_this_process == [names[2]]
    assert [result["accuracy"] for result in first.values()] == [result["accuracy"] for result in again.values()]


def test_results_of_another_recipe_are_refused_and_kept(recipe_file, tmp_path, in_this_process):
    only = ["seeds=[0]", "mixers=[linear_attention]"]
    cells = load_mqar_recipe(recipe_file, only).cells()
    grid.run_grid(cells, train_and_test, tmp_path, 1, "tiny")
    before = grid.cell_path(tmp_path, cells[0]).read_text()
    other = load_mqar_recipe(recipe_file, [*only, "training.clip=2.0"]).cells()
    with pytest.raises(ValueError, match="made with other settings \\(training"):
        grid.run_grid(other, train_and_test, tmp_path, 1, "tiny")
    assert grid.cell_path(tmp_path, cells[0]).read_text() == before


def test_a_torn_cell_is_named_with_the_way_out(recipe_file, tmp_path):
    cells = load_mqar_recipe(recipe_file).cells()
    grid.cell_path(tmp_path, cells[0]).parent.mkdir()
    grid.cell_path(tmp_path, cells[0]).write_text('{"kind": "ce')
    with pytest.raises(ValueError, match=r"not valid JSON: .*; remove it to run the cell again"):
        grid.finished(cells, tmp_path)


def test_the_command_runs_in_processes_and_leaves_table_figure_and_results(recipe_file, tmp_path, capsys):
    out = tmp_path / "out"
    overrides = ["seeds=[0]", "mixers=[linear_attention]", "learning_rates=[1e-2, 1e-3]"]
    options = ["--out", str(out), "--processes", "2", "--save-models"]
    assert main(["mqar", str(recipe_file), *overrides, *options]) == 0
    assert "| linear_attention | 16 |" in capsys.readouterr().out
    results = read_results(out / "results.json", "mqar")
    assert results["chosen"][0]["learning_rate"] in (1e-2, 1e-3)
    assert results["provenance"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (out / "accuracy.png").is_file()
    assert (out / "accuracy.svg").is_file()
    assert len(list((out / "cells").glob("*.json"))) == 2
    saved = out / "models" / "linear_attention-d16-lr0.01-seed0"
    assert main(["eval", str(saved), "--suite", "mqar", "--recipe", str(recipe_file)]) == 0
    kept = read_results(out / "cells" / f"{saved.name}.json")["accuracy"]["32:4"]
    assert f"{100 * kept:.2f}" in capsys.readouterr().out


def hand_made(mixer, rate, seed, *accuracies):
    cell = {"mixer": mixer, "hidden_size": 16, "learning_rate": rate, "seed": seed}
    scores = dict(zip(("16:2", "32:4"), accuracies))
    return {"cell": cell, "accuracy": scores, "parameters": 10, "state_numbers": 4}


def test_the_best_learning_rate_is_by_the_mean_over_seeds_and_segments(recipe_file):
    runs = [
        hand_made("attention", 1e-2, 0, 1.0, 0.8),
        hand_made("attention", 1e-2, 1, 0.2, 0.0),  # mean 0.5, in spite of the best single run
        hand_made("attention", 1e-3, 0, 0.7, 0.5),
        hand_made("attention", 1e-3, 1, 0.8, 0.6),  # mean 0.65
    ]
    chosen = choose(runs)
    assert [(row["mixer"], row["learning_rate"]) for row in chosen] == [("attention", 1e-3)]
    assert chosen[0]["accuracy"]["16:2"] == [0.7, 0.8]
    assert spread([0.7, 0.8]) == pytest.approx(0.0707, abs=1e-4)
    (table,) = tables({"chosen": chosen, "recipe": {"name": "tiny"}})
    assert table.header[5:7] == ["16:2", "32:4"]
    assert "75.0 ± 7.1 | 55.0 ± 7.1 | 65.0 ± 7.1 | 60.0, 70.0" in str(table)


def grid_of(**accuracies):
    """What ``choose`` says about mixers with these accuracies on both segments, seed by seed."""
    runs = [
        hand_made(mixer, 1e-2, seed, value, value)
        for mixer, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    return {"chosen": choose(runs), "recipe": {"name": "tiny", "task": {"rewriting": True}, "test": SEGMENTS}}


SEGMENTS = [{"length": 16, "pairs": 2}, {"length": 32, "pairs": 4}]


def test_the_differences_from_mdn_have_welchs_interval_and_a_verdict():
    content = grid_of(momentum_deltanet=(0.90, 0.92), kda=(0.89, 0.95), comba=(0.5, 0.52), mamba2=(0.98, 1.0))
    _, differences = tables(content)
    shown = {row[0]: (row[-2], row[-1]) for row in differences.rows}
    assert list(shown) == ["mamba2", "kda", "comba"]  # the best others first
    # Two seeds each: the standard error of the difference is 0.01414 with two degrees of freedom, t = 4.303.
    assert shown["comba"] == ("**40.0 ± 6.1**", "momentum_deltanet is better")
    assert shown["mamba2"][1] == "mamba2 is better"
    assert shown["kda"][1] == "no significant difference"
    assert len(tables(grid_of(momentum_deltanet=(0.9,), kda=(0.8,)))) == 1  # one seed decides nothing


def test_bars_stay_on_the_axis_and_the_title_names_the_task():
    (axis,) = draw(grid_of(momentum_deltanet=(1.0, 1.0, 0.2))).axes
    assert axis.get_title() == "MQAR with rewriting, d 16"
    low, high = axis.get_ylim()
    ends = [y for container in axis.containers for bar in container[2] for line in bar.get_segments() for _, y in line]
    assert ends
    assert all(low < y < high for y in ends)


def test_a_rate_with_missing_seeds_cannot_win(recipe_file):
    runs = [
        hand_made("kda", 1e-2, 0, 0.9, 0.9),
        hand_made("kda", 1e-3, 0, 0.5, 0.5),
        hand_made("kda", 1e-3, 1, 0.5, 0.5),
    ]
    assert choose(runs)[0]["learning_rate"] == 1e-3


def test_the_figure_has_a_panel_per_size_and_a_place_per_segment(recipe_file, tmp_path):
    chosen = choose([hand_made("attention", 1e-2, 0, 1.0, 0.8), hand_made("kda", 1e-2, 0, 0.5, 0.25)])
    recipe = load_mqar_recipe(recipe_file).model_dump(mode="json")
    save_figure(draw({"chosen": chosen, "recipe": recipe}), tmp_path / "figure.png", command="mdn mqar")
    words = (tmp_path / "figure.svg").read_text()
    assert all(word in words for word in ("MQAR, d 16", ">16:2<", ">32:4<", ">attention<", ">kda<"))


@pytest.mark.parametrize("name", ["paper", "quick", "rewrite"])
def test_packaged_recipes_build_a_model_for_every_mixer(name):
    recipe = load_mqar_recipe(name)
    assert set(recipe.mixers) == {"momentum_deltanet", "gated_deltanet", "comba", "kda", "mamba2", "attention"}
    assert recipe.task.rewriting == (name == "rewrite")
    for cell in {cell.mixer: cell for cell in recipe.cells()}.values():
        with torch.device("meta"):
            MomentumDeltaNetForCausalLM(cell.config())


def test_the_paper_recipe_is_the_papers_grid():
    recipe = load_mqar_recipe("paper")
    assert [(s.length, s.pairs, s.examples) for s in recipe.train] == [
        (64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)
    ]  # fmt: skip
    assert recipe.learning_rates == (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
    assert recipe.hidden_sizes == (128, 256)
    assert (recipe.training.epochs, recipe.training.batch_size, recipe.training.betas) == (32, 256, (0.9, 0.98))
    assert recipe.total_steps == 32 * (391 + 4 * 79)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainin.steps=3"], "unknown key 'trainin'.*training"),
        (["mixers={kdaa: {}}"], "kda"),
        (["mixers=[kdaa]"], "kda"),
        (["test=[{length: 8, pairs: 4}]"], "test segment 8:4"),
        (["training.steps=5"], "exactly one of epochs and steps"),
        (["model.hidden_sise=4"], "hidden_size"),
    ],
)
def test_wrong_recipes_are_refused_with_the_key_named(recipe_file, overrides, words):
    with pytest.raises(ValueError, match=words):
        load_mqar_recipe(recipe_file, overrides)

"""Cells, the grid over processes, resuming, the choice of the learning rate, and the report."""

import json

import pytest
import torch

from mdn.cli import main
from mdn.evaluation.mqar import grid
from mdn.evaluation.mqar.data import generate
from mdn.evaluation.mqar.recipe import load_mqar_recipe
from mdn.evaluation.mqar.report import choose, draw, table
from mdn.evaluation.mqar.train import accuracy, batches, query_logits, rate_at, run_cell, total_steps
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


def test_accuracy_is_the_share_of_right_answers_per_example():
    logits = torch.zeros(2, 4, 8)
    answers = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1]])
    logits[0, 0, 1] = logits[0, 1, 2] = logits[0, 2, 7] = logits[0, 3, 4] = 1  # 3 of 4
    logits[1, 0, 5] = logits[1, 1, 5] = logits[1, 2, 5] = logits[1, 3, 5] = 1  # 1 of 4
    assert accuracy(logits, answers).tolist() == [0.75, 0.25]


def test_logits_at_the_queries_are_those_of_the_whole_model(recipe_file):
    recipe = load_mqar_recipe(recipe_file)
    model = MomentumDeltaNetForCausalLM(recipe.config_of(recipe.cells()[0]))
    examples = generate(3, 16, 2, vocab_size=64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        everywhere, found = model(examples.inputs).logits, query_logits(model, examples)
    for row in range(3):
        torch.testing.assert_close(found[row], everywhere[row, examples.queries[row]])


def test_an_epoch_shows_every_example_once_and_a_step_shows_fresh_ones(recipe_file):
    recipe = load_mqar_recipe(recipe_file)
    shown = [tuple(row) for examples in batches(recipe, seed=0) for row in examples.inputs.tolist()]
    assert len(shown) == 80
    assert len(set(shown)) == 40
    assert total_steps(recipe) == 6
    fresh = load_mqar_recipe(recipe_file, ["training={steps: 5, batch_tokens: 64}"])
    shown = [tuple(row) for examples in batches(fresh, seed=0) for row in examples.inputs.tolist()]
    assert len(shown) == len(set(shown)) == 5 * 4


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [rate_at(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates == sorted(rates[:11]) + sorted(rates[11:], reverse=True)


def test_a_mixer_learns_the_easiest_segment(recipe_file):
    """Two pairs among a small vocabulary: far above the chance of 1/32 after a few hundred small steps."""
    overrides = ["task.vocab_size=32", "training={steps: 300, batch_tokens: 512}", "hidden_sizes=[32]"]
    recipe = load_mqar_recipe(recipe_file, [*overrides, "mixers={gated_deltanet: {}}", "seeds=[0]"])
    result = run_cell(recipe, recipe.cells()[0])
    assert result["accuracy"]["16:2"] > 0.5
    assert result["losses"][-1][1] < result["losses"][0][1] / 2


def test_the_grid_writes_a_file_per_cell_and_runs_only_what_is_missing(recipe_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(grid, "completed", _completed_in_this_process)
    recipe = load_mqar_recipe(recipe_file)
    first = grid.run_grid(recipe, out, processes=1)
    assert sorted(path.stem for path in (out / "cells").iterdir()) == sorted(cell.name for cell in recipe.cells())
    removed = out / "cells" / f"{recipe.cells()[2].name}.json"
    removed.unlink()
    _completed_in_this_process.seen.clear()
    again = grid.run_grid(recipe, out, processes=1)
    assert _completed_in_this_process.seen == [recipe.cells()[2].name]
    assert {name: result["accuracy"] for name, result in first.items()} == {
        name: result["accuracy"] for name, result in again.items()
    }


def _completed_in_this_process(job, jobs, processes):
    for arguments in jobs:
        _completed_in_this_process.seen.append(arguments[1].name)
        yield job(*arguments)


_completed_in_this_process.seen = []


def test_results_of_another_recipe_are_refused_and_kept(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "completed", _completed_in_this_process)
    one = load_mqar_recipe(recipe_file, ["seeds=[0]", "mixers={linear_attention: {}}"])
    grid.run_grid(one, tmp_path / "out", processes=1)
    path = grid.cell_path(tmp_path / "out", one.cells()[0])
    before = path.read_text()
    other = load_mqar_recipe(recipe_file, ["seeds=[0]", "mixers={linear_attention: {}}", "training.clip=2.0"])
    with pytest.raises(ValueError, match="another recipe"):
        grid.run_grid(other, tmp_path / "out", processes=1)
    assert path.read_text() == before


def test_the_command_runs_in_processes_and_leaves_table_figure_and_results(recipe_file, tmp_path, capsys):
    out = tmp_path / "out"
    overrides = ["seeds=[0]", "mixers={linear_attention: {}}", "learning_rates=[1e-2, 1e-3]"]
    options = ["--out", str(out), "--processes", "2", "--save-models"]
    assert main(["mqar", str(recipe_file), *overrides, *options]) == 0
    assert "| linear_attention | 16 |" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert results["chosen"][0]["learning_rate"] in (1e-2, 1e-3)
    assert results["provenance"]["versions"]["torch"] == torch.__version__
    assert (out / "accuracy.png").is_file()
    assert (out / "accuracy.svg").is_file()
    assert len(list((out / "cells").iterdir())) == 2
    saved = out / "models" / "linear_attention-d16-lr0.01-seed0"
    assert main(["eval", str(saved), "--suite", "mqar", "--recipe", str(recipe_file)]) == 0
    kept = json.loads((out / "cells" / f"{saved.name}.json").read_text())["accuracy"]["32:4"]
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
    chosen = choose({str(number): run for number, run in enumerate(runs)})
    assert [(row.mixer, row.learning_rate) for row in chosen] == [("attention", 1e-3)]
    assert chosen[0].mean("16:2") == pytest.approx(0.75)
    assert chosen[0].spread("16:2") == pytest.approx(0.0707, abs=1e-4)
    text = table(load_mqar_recipe(recipe_file), chosen)
    assert text.splitlines()[0].split(" | ")[5:7] == ["16:2", "32:4"]
    assert "75.0 ± 7.1 | 55.0 ± 7.1 | 65.0 ± 7.1" in text


def test_a_rate_with_missing_seeds_cannot_win(recipe_file):
    runs = [
        hand_made("kda", 1e-2, 0, 0.9, 0.9),
        hand_made("kda", 1e-3, 0, 0.5, 0.5),
        hand_made("kda", 1e-3, 1, 0.5, 0.5),
    ]
    assert choose({str(number): run for number, run in enumerate(runs)})[0].learning_rate == 1e-3


def test_the_figure_has_a_panel_per_length(recipe_file, tmp_path):
    chosen = choose({"0": hand_made("attention", 1e-2, 0, 1.0, 0.8), "1": hand_made("kda", 1e-2, 0, 0.5, 0.25)})
    draw(load_mqar_recipe(recipe_file), chosen, tmp_path / "figure.png", command="mdn mqar")
    words = (tmp_path / "figure.svg").read_text()
    assert all(word in words for word in ("length 16, d 16", "length 32, d 16", ">attention<", ">kda<"))


@pytest.mark.parametrize("name", ["paper", "quick", "rewrite"])
def test_packaged_recipes_build_a_model_for_every_mixer(name):
    recipe = load_mqar_recipe(name)
    assert set(recipe.mixers) == {"momentum_deltanet", "gated_deltanet", "comba", "kda", "mamba2", "attention"}
    assert recipe.task.rewriting == (name == "rewrite")
    for cell in {cell.mixer: cell for cell in recipe.cells()}.values():
        with torch.device("meta"):
            MomentumDeltaNetForCausalLM(recipe.config_of(cell))


def test_the_paper_recipe_is_the_papers_grid():
    recipe = load_mqar_recipe("paper")
    assert [(s.length, s.pairs, s.examples) for s in recipe.train] == [
        (64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)
    ]  # fmt: skip
    assert recipe.learning_rates == (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
    assert recipe.hidden_sizes == (128, 256)
    assert (recipe.training.epochs, recipe.training.batch_size, recipe.training.betas) == (32, 256, (0.9, 0.98))
    assert total_steps(recipe) == 32 * (391 + 4 * 79)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainin.steps=3"], "unknown key 'trainin'.*training"),
        (["mixers={kdaa: {}}"], "kda"),
        (["test=[{length: 8, pairs: 4}]"], "test segment 8:4"),
        (["training.steps=5"], "exactly one of epochs and steps"),
        (["model.hidden_sise=4"], "hidden_size"),
    ],
)
def test_wrong_recipes_are_refused_with_the_key_named(recipe_file, overrides, words):
    with pytest.raises(ValueError, match=words):
        load_mqar_recipe(recipe_file, overrides)

"""Ablations, causality and decoding benchmarks at a tiny size: what is measured, what is kept, and what is refused."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from mdn.analysis import ablation, causality, figures
from mdn.analysis.ablation import EXACT, PAPER, Cell, Scale, cells
from mdn.analysis.ablation_rows import ROWS, choose_rows
from mdn.analysis.ablation_table import summarise, table
from mdn.analysis.paper_arithmetic import masked_coefficients, paper_arithmetic
from mdn.bench.decode import Size, bench, cache_bytes, equal_configs, filled_cache, growth
from mdn.bench.paper_form import log_domain_coefficients
from mdn.cli import main
from mdn.layers import MIXERS, MomentumDeltaNet
from mdn.models import MomentumDeltaNetForCausalLM
from mdn.training.build import count_parameters
from mdn.training.monitor import NonFiniteError

ROOT = Path(__file__).resolve().parents[2]
TINY = Size(hidden_size=32, layers=2, heads=2, vocab_size=50)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Forty short documents, and a token cache of their own."""
    monkeypatch.setenv("MDN_CACHE", str(tmp_path / "cache"))
    words = random.Random(0)
    lines = [
        json.dumps({"text": " ".join(words.choices(["red", "green", "blue", "one", "two"], k=80))}) for _ in range(40)
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def tiny_scale(text):
    return Scale(steps=3, paper_steps=2, batch_tokens=128, sequence_length=64, held_out_bytes=800, text=text)


# ------------------------------------------------------------------------------------------------- blockwise momentum


def test_changing_the_block_size_changes_a_models_output_and_is_undone():
    torch.manual_seed(0)
    config = equal_configs(["momentum_deltanet"], TINY)["momentum_deltanet"]
    model = MomentumDeltaNetForCausalLM(config).eval()
    ids = torch.randint(50, (1, 32))
    with torch.no_grad():
        stepwise = model(input_ids=ids).logits
        with causality.block_size_of(model, 16):
            blockwise = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    assert (stepwise - blockwise).abs().max() > 1e-6
    torch.testing.assert_close(stepwise, again)
    with causality.block_size_of(model, 16):
        assert causality.decoding_difference(model, ids) < 1e-4  # decoding is stepwise whatever the block size


def test_analyze_causality_trains_evaluates_both_ways_and_reads_what_is_there(tmp_path, capsys):
    out, results = tmp_path / "out", tmp_path / "r.json"
    options = ["--tasks", "rewriting", "--blocks", "16", "--seeds", "1", "--steps", "2", "--out", str(out)]
    plot = ["--plot", str(tmp_path / "c.png")]
    assert main(["analyze", "causality", *options, "--json", str(results), *plot]) == 0
    (entry,) = json.loads(results.read_text())["results"]
    assert set(entry["as trained"]) == set(entry["stepwise"]) == {"64:8", "128:16"}
    assert float(entry["decoding"]) < 1e-3
    assert (tmp_path / "c.svg").is_file()
    before = (out / "rewriting-block16-seed0.json").stat().st_mtime_ns
    assert main(["analyze", "causality", *options, "--only-read"]) == 0
    assert (out / "rewriting-block16-seed0.json").stat().st_mtime_ns == before
    capsys.readouterr()
    assert main(["analyze", "causality", *options[:-4], "--steps", "9", "--out", str(out)]) == 2
    assert "holds another cell" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- ablations


def test_every_row_builds_a_model_that_differs_from_the_full_one_as_it_says(tmp_path):
    fields = {name: ablation.recipe_of(Cell(name, 0, EXACT), Scale(), tmp_path).model for name in ROWS}
    assert fields["no clamp of log mu"]["min_log_mu"] is None
    assert fields["hybrid 3:1"]["attn"]["layers"] == [3, 7]
    assert fields["hybrid 7:1"]["attn"]["layers"] == [7]
    full = fields.pop("full")
    assert all(full != other for other in fields.values())


def test_rows_are_chosen_by_name_or_group():
    assert choose_rows("all") == list(ROWS)
    assert choose_rows("hybrids,full") == ["8 layers", "hybrid 3:1", "hybrid 7:1", "full"]
    with pytest.raises(ValueError, match="no row or group 'half'"):
        choose_rows("half")


def test_the_grid_runs_seed_by_seed_and_the_papers_arithmetic_for_component_rows():
    grid = cells(["full", "8 layers"], 2, 1)
    assert [(c.row, c.seed, c.arithmetic) for c in grid] == [
        ("full", 0, EXACT),
        ("8 layers", 0, EXACT),
        ("full", 0, PAPER),
        ("full", 1, EXACT),
        ("8 layers", 1, EXACT),
    ]


def test_a_cell_trains_measures_growth_and_is_not_run_twice(tmp_path, text, monkeypatch):
    scale, cell = tiny_scale(text), Cell("alpha_max = 1", 0, EXACT)
    result = ablation.run_cell(cell, scale, tmp_path / "out")
    assert result["diverged"] is None
    assert result["held_out"]["bits_per_byte"] > 0
    assert result["largest state rms in training"] > 0
    assert [entry["layer"] for entry in result["growth"]] == [0, 1]
    monkeypatch.setattr(ablation, "train", lambda recipe: pytest.fail("trained again"))
    assert ablation.run_cell(cell, scale, tmp_path / "out") == result
    with pytest.raises(ValueError, match="another scale"):
        ablation.run_cell(cell, Scale(steps=4, text=text), tmp_path / "out")


def test_a_diverged_cell_names_its_step(tmp_path, text, monkeypatch):
    def fail(recipe):
        raise NonFiniteError("step 17: loss nan, gradient norm nan", step=17)

    monkeypatch.setattr(ablation, "train", fail)
    result = ablation.run_cell(Cell("full", 0, EXACT), tiny_scale(text), tmp_path / "out")
    assert result["diverged"] == 17
    assert len(result["growth"]) == 2  # of the first weights


def test_mu_zero_trains_in_exact_arithmetic_and_fails_at_step_1_in_the_papers(tmp_path, text):
    scale = tiny_scale(text)
    results = [ablation.run_cell(Cell("mu = 0", 0, kind), scale, tmp_path / "out") for kind in (EXACT, PAPER)]
    assert [result["diverged"] for result in results] == [None, 1]
    (row,) = summarise(results)
    assert row["verdict"] == "arithmetic: only the log-domain form fails"
    assert "step 1" in table([row])


def test_growth_of_the_state_is_called_dynamics():
    cell = {"row": "alpha_max = 1", "arithmetic": EXACT, "seed": 0, "diverged": None, "largest log10 growth": 15.0}
    (row,) = summarise([cell | {"held_out": {"bits_per_byte": 2.0}}])
    assert row["verdict"].startswith("dynamics: the state grows")
    (row,) = summarise([cell | {"diverged": 3}])
    assert row["verdict"].startswith("dynamics: diverges")


def test_the_masked_log_domain_coefficients_have_the_values_of_the_papers():
    torch.manual_seed(0)
    log_alpha, log_mu = -torch.rand(2, 3, 20) * 0.2
    beta = torch.rand(3, 20)
    expected = log_domain_coefficients(log_alpha, log_mu, beta)
    for mine, theirs in zip(masked_coefficients(log_alpha, log_mu, beta), expected):
        torch.testing.assert_close(mine, theirs)


def test_the_papers_arithmetic_agrees_with_the_exact_form_where_it_is_well_conditioned():
    torch.manual_seed(0)
    layer = MomentumDeltaNet(32, 8, 2, expand_v=1, min_log_mu=-0.05, layer_idx=0).eval()
    hidden = torch.randn(1, 40, 32)
    exact = layer(hidden)
    with paper_arithmetic():
        paper = layer(hidden)
    assert not torch.equal(exact, paper)  # it is other arithmetic
    torch.testing.assert_close(exact, paper, rtol=1e-3, atol=1e-4)


def test_ablate_prints_a_table_and_writes_figure_and_results(tmp_path, text, capsys):
    options = ["--rows", "full", "--seeds", "1", "--paper-seeds", "0", "--steps", "2", "--batch-tokens", "256"]
    where = ["--out", str(tmp_path / "out"), "--text", text]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(["ablate", *options, *where, *files]) == 0
    assert "| full | trains" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["diverged at"] == [None]
    assert (tmp_path / "a.svg").is_file()
    assert main(["ablate", "--only-read", "--out", str(tmp_path / "empty")]) == 2
    assert "holds no finished cell" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- decoding


def test_all_mixers_are_compared_at_equal_size():
    counts = {mixer: count_parameters(config) for mixer, config in equal_configs(list(MIXERS), Size()).items()}
    reference = counts["momentum_deltanet"]
    assert all(abs(count - reference) < 0.005 * reference for count in counts.values()), counts


@pytest.mark.parametrize("mixer", ["momentum_deltanet", "attention"])
def test_a_made_cache_is_as_large_as_a_decoded_one(mixer):
    torch.manual_seed(0)
    model = MomentumDeltaNetForCausalLM(equal_configs([mixer], TINY)[mixer]).eval()
    with torch.no_grad():
        real = model(input_ids=torch.randint(50, (2, 100)), use_cache=True).past_key_values
    made = filled_cache(model, 2, 100)
    assert cache_bytes(made) == cache_bytes(real)
    assert made.get_seq_length() == real.get_seq_length() == 100


def test_memory_is_flat_for_mdn_and_grows_with_context_for_attention():
    found = bench(["momentum_deltanet", "attention"], [128, 512], [1, 2], TINY, repeats=2, seconds=2)
    memory = {(r["mixer"], r["batch"], r["context"]): r["bytes per sequence"] for r in found["rows"]}
    assert memory["momentum_deltanet", 1, 128] == memory["momentum_deltanet", 2, 512]
    assert memory["attention", 1, 512] == 4 * memory["attention", 1, 128] == 512 * 2 * 2 * 32 * 4
    assert all(r["ratio to MDN"] == 1 for r in found["rows"] if r["mixer"] == "momentum_deltanet")
    assert growth(found["rows"], "attention", 1) > 0


def test_decoding_with_attention_slows_down_with_context_and_with_mdn_it_does_not():
    found = bench(["momentum_deltanet", "attention"], [128, 16384], [1], Size(128, 2, 4, 64), repeats=20, seconds=6)
    assert growth(found["rows"], "attention", 1) > 3
    assert growth(found["rows"], "momentum_deltanet", 1) < 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "decode", "--mixers", "transformer"], "--mixers has unknown names"),
        (["bench", "decode", "--contexts", "128,long"], "--contexts must be positive"),
        (["ablate", "--seeds", "0"], "--seeds must be at least 1"),
        (["analyze", "causality", "--tasks", "sums"], "--tasks must be among"),
        (["analyze", "causality", "--blocks", "0"], "--blocks must be positive"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


# ------------------------------------------------------------------------------------------------ figures of the docs


def words_of(svg):
    """All text of a drawing: titles, labels, ticks, legends and the command."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_every_recorded_result_of_the_docs_gives_its_figure_again(tmp_path):
    data, kept = ROOT / figures.DATA, ROOT / figures.FIGURES
    assert figures.main(["--data", str(data), "--figures", str(tmp_path)]) == 0
    names = sorted(path.stem for path in data.glob("*.json"))
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == names
    for name in names:
        assert (kept / f"{name}.png").is_file(), f"make figures was not run for {name}"
        assert words_of(tmp_path / f"{name}.svg") == words_of(kept / f"{name}.svg"), f"{name} is out of date"


def test_every_figure_that_the_experiment_pages_show_has_recorded_results():
    pages = [*(ROOT / "docs" / "experiments").glob("*.md"), ROOT / "docs" / "analysis.md"]
    for page in pages:
        for name in re.findall(r"\]\([./]*figures/([\w-]+)\.(?:png|svg)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / figures.DATA / f"{name}.json").is_file(), f"{page} shows {name}"

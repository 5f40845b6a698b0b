"""Ablations at a tiny size: rows, cells, verdicts, and the paper's arithmetic beside the exact one."""

import json
import random

import pytest
import torch

from mdn.bench.paper_form import log_domain_coefficients, masked_coefficients, paper_chunk_momentum_delta_rule
from mdn.cli import main
from mdn.common.results import read_results
from mdn.experiments.ablation_cells import (
    EXACT,
    PAPER,
    ROWS,
    AblationCell,
    AblationScale,
    ablation_cells,
    choose_rows,
    train_ablation,
)
from mdn.experiments.ablation_results import added, difference, summarise, tables
from mdn.experiments.grid import run_cell
from mdn.experiments.paper_backend import paper_backend
from mdn.layers import MomentumDeltaNet
from mdn.ops import chunk_momentum_delta_rule
from mdn.training.monitor import NonFiniteError


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """Three steps on forty short documents, with a token cache of their own."""
    monkeypatch.setenv("MDN_CACHE", str(tmp_path / "cache"))
    words = random.Random(0)
    lines = [
        json.dumps({"text": " ".join(words.choices(["red", "green", "blue", "one", "two"], k=80))}) for _ in range(40)
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    sizes = {"batch_tokens": 128, "sequence_length": 64, "held_out_bytes": 800}
    return AblationScale(steps=3, paper_steps=2, text=str(path), **sizes)


def result_of(cell, out):
    return run_cell(cell, lambda cell: train_ablation(cell, out), out)[1]


def test_every_row_builds_a_model_that_differs_from_the_full_one_as_it_says(tmp_path):
    fields = {name: AblationCell(name, 0, EXACT).recipe(tmp_path).model for name in ROWS}
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
    grid = ablation_cells(["full", "8 layers"], 2, 1, AblationScale())
    assert [(c.row, c.seed, c.arithmetic) for c in grid] == [
        ("full", 0, EXACT),
        ("8 layers", 0, EXACT),
        ("full", 0, PAPER),
        ("full", 1, EXACT),
        ("8 layers", 1, EXACT),
    ]


def test_a_cell_trains_measures_growth_and_is_not_run_twice(tmp_path, scale, monkeypatch):
    cell, out = AblationCell("alpha_max = 1", 0, EXACT, scale), tmp_path / "out"
    result = result_of(cell, out)
    assert result["diverged"] is None
    assert result["held_out"]["bits_per_byte"] > 0
    assert result["largest state rms in training"] > 0
    assert [entry["layer"] for entry in result["growth"]] == [0, 1]
    monkeypatch.setattr("mdn.experiments.ablation_cells.train", lambda recipe: pytest.fail("trained again"))
    assert result_of(cell, out) == result
    with pytest.raises(ValueError, match="other settings"):
        result_of(AblationCell("alpha_max = 1", 0, EXACT, AblationScale(steps=4)), out)


def test_a_diverged_cell_names_its_step(tmp_path, scale, monkeypatch):
    def fail(recipe):
        raise NonFiniteError("loss nan, gradient norm nan", step=17)

    monkeypatch.setattr("mdn.experiments.ablation_cells.train", fail)
    result = result_of(AblationCell("full", 0, EXACT, scale), tmp_path / "out")
    assert result["diverged"] == 17
    assert len(result["growth"]) == 2  # of the initial values


def test_mu_zero_trains_in_exact_arithmetic_and_fails_at_step_1_in_the_papers(tmp_path, scale):
    results = [result_of(AblationCell("mu = 0", 0, kind, scale), tmp_path / "out") for kind in (EXACT, PAPER)]
    assert [result["diverged"] for result in results] == [None, 1]
    (row,) = summarise(results)
    assert row["verdict"] == "arithmetic: only the log-domain form fails"
    (table,) = tables({"rows": [row], "cells": 2, "of": 2})
    assert "step 1" in str(table)


# ------------------------------------------------------------------------------------------------------------ verdicts


def finished(arithmetic=EXACT, steps=200, **changes):
    result = {"row": "alpha_max = 1", "seed": 0, "steps": steps, "diverged": None, "held_out": {"bits_per_byte": 2.0}}
    return result | {"arithmetic": arithmetic, "largest log10 growth": 0.5, "seconds": 60.0} | changes


def verdict_of(*results):
    (row,) = summarise(list(results))
    return row["verdict"]


def test_growth_of_the_state_is_called_dynamics():
    assert verdict_of(finished(**{"largest log10 growth": 15.0})).startswith("dynamics: the state grows")
    assert verdict_of(finished(diverged=3)).startswith("dynamics: diverges")


def test_a_row_is_stable_only_where_stability_was_tested():
    assert verdict_of(finished(), finished(PAPER)) == "stable"
    assert verdict_of(finished()) == "stable; paper's arithmetic not tested"
    assert verdict_of(finished(steps=2)) == "not tested: 2 steps"
    assert verdict_of(finished(PAPER)) == "not tested: the exact form did not run"


# --------------------------------------------------------------------------------------------------- rows beside others


def row_of(name, *bits):
    results = [finished(row=name, seed=seed, held_out={"bits_per_byte": value}) for seed, value in enumerate(bits)]
    return summarise(results)[0]


def test_hybrids_are_compared_with_their_own_depth_and_the_others_with_the_full_model():
    rows = [
        row_of("full", 2.0, 2.1),
        row_of("mu = 0", 1.5, 1.6),
        row_of("8 layers", 3.0, 3.1),
        row_of("hybrid 3:1", 3.0),
    ]
    assert difference(rows[0], rows) is difference(rows[2], rows) is difference(rows[3], rows) is None
    assert difference(rows[1], rows).mean == pytest.approx(-0.5)
    rows[3] = row_of("hybrid 3:1", 3.2, 3.3)
    assert difference(rows[3], rows).mean == pytest.approx(0.2)
    (table,) = tables({"rows": rows, "cells": 8, "of": 8})
    assert [row[4] for row in table.rows] == ["–", "**-0.500 ± 0.304**", "–", "0.200 ± 0.304"]


def test_rows_are_added_to_recorded_ones_or_replace_them_in_the_order_of_the_table():
    recorded = {"command": "mdn ablate", "scale": {"steps": 200}, "cells": 4, "of": 4}
    recorded |= {"rows": [row_of("full", 2.0, 2.1), row_of("beta_max = 1", 2.0, 2.2)]}
    new = {"scale": {"steps": 200}, "cells": 3, "of": 3, "rows": [row_of("mu = 0", 1.0), row_of("full", 1.9, 1.8)]}
    both = added(recorded, new, "mdn ablate --rows ...")
    assert [row["row"] for row in both["rows"]] == ["full", "mu = 0", "beta_max = 1"]
    assert [row.get("command") for row in both["rows"]] == ["mdn ablate --rows ..."] * 2 + [None]
    assert (both["cells"], both["of"], both["command"]) == (5, 5, "mdn ablate")
    with pytest.raises(ValueError, match="--add-to: the rows there were trained with"):
        added(recorded, new | {"scale": {"steps": 2}}, "")


# ----------------------------------------------------------------------------------------------- the paper's arithmetic


@pytest.mark.parametrize(("form", "is_finite"), [(masked_coefficients, True), (log_domain_coefficients, False)])
def test_entries_that_nobody_uses_spoil_the_gradient_if_they_are_masked_after_the_exponential(form, is_finite):
    log_alpha, log_mu = (torch.full((64,), value, requires_grad=True) for value in (-2.0, -2.0))
    found = form(log_alpha, log_mu, torch.full((64,), 0.1))
    assert found.gamma.isfinite().all()
    grads = torch.autograd.grad(found.gamma.sum(), (log_alpha, log_mu))
    assert all(grad.isfinite().all() for grad in grads) == is_finite


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
    layer.rule.backend = "paper"
    with paper_backend():
        paper = layer(hidden)
    assert not torch.equal(exact, paper)  # it is other arithmetic
    torch.testing.assert_close(exact, paper, rtol=1e-3, atol=1e-4)


def test_the_papers_backend_is_refused_where_nobody_registered_it():
    inputs = make_rule_inputs()
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'paper'"):
        chunk_momentum_delta_rule(**inputs, backend="paper")


def make_rule_inputs():
    """Well-conditioned for the paper's form: mu falls slower than alpha."""
    torch.manual_seed(0)
    vectors = {name: torch.randn(2, 70, 2, 8) for name in ("q", "k", "v")}
    gates = {"log_alpha": -0.1 * torch.rand(2, 70, 2), "log_mu": -0.05 * torch.rand(2, 70, 2)}
    return vectors | gates | {"beta": 0.5 * torch.rand(2, 70, 2), "eta": torch.rand(2, 70, 2)}


def test_gradients_of_the_papers_backend_are_those_of_its_formula():
    inputs = {name: x.requires_grad_() for name, x in make_rule_inputs().items()}
    with paper_backend():
        o, _ = chunk_momentum_delta_rule(**inputs, backend="paper")
        grads = torch.autograd.grad(o.square().sum(), list(inputs.values()))
    formula = paper_chunk_momentum_delta_rule(**inputs).o
    torch.testing.assert_close(o, formula)
    for grad, expected in zip(grads, torch.autograd.grad(formula.square().sum(), list(inputs.values()))):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 10, 70])}, "cu_seqlens must be None"),
        ({"initial_state": torch.zeros(2, 1, 2, 8, 8)}, "initial_state must be None"),
        ({"use_p_times_alpha": False}, "needs p = alpha k"),
    ],
)
def test_the_papers_backend_refuses_what_it_cannot_do(changes, message):
    inputs = {name: x[:1] for name, x in make_rule_inputs().items()}
    with paper_backend(), pytest.raises(ValueError, match=message):
        chunk_momentum_delta_rule(**inputs, **changes, backend="paper")


def test_ablate_prints_a_table_and_writes_figure_and_results(tmp_path, scale, capsys):
    options = ["--rows", "full", "--seeds", "1", "--paper-seeds", "0", "--steps", "2", "--batch-tokens", "256"]
    where = ["--out", str(tmp_path / "out"), "--text", scale.text, "--processes", "1"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(["ablate", *options, *where, *files]) == 0
    printed = capsys.readouterr().out
    assert "| full | trains" in printed
    assert "not tested: 2 steps" in printed
    assert read_results(tmp_path / "a.json", "ablations")["rows"][0]["diverged at"] == [None]
    assert (tmp_path / "a.json").read_text() == (tmp_path / "out" / "results.json").read_text()
    assert (tmp_path / "a.svg").is_file()
    more = ["--rows", "mu = 0", *options[2:], *where, "--add-to", str(tmp_path / "a.json")]
    assert main(["ablate", *more]) == 0
    together = read_results(tmp_path / "a.json", "ablations")
    assert [row["row"] for row in together["rows"]] == ["full", "mu = 0"]
    assert (together["cells"], together["of"]) == (2, 2)
    assert main(["ablate", "--only-read", "--out", str(tmp_path / "empty")]) == 2
    assert "holds no finished cell" in capsys.readouterr().err

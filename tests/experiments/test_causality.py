"""Blockwise against stepwise momentum at a tiny size: what is measured, what is kept, and what is refused."""

import torch

from mdn.bench.decoding import DecodingSize
from mdn.cli import main
from mdn.common.results import read_results
from mdn.experiments import causality
from mdn.models import MomentumDeltaNetForCausalLM


def test_changing_the_block_size_changes_a_models_output_and_is_undone():
    torch.manual_seed(0)
    size = DecodingSize(hidden_size=32, layers=2, heads=2, vocab_size=50)
    model = MomentumDeltaNetForCausalLM(size.configs(["momentum_deltanet"])["momentum_deltanet"]).eval()
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
    assert main(["analyze", "causality", *options, "--json", str(results), *plot, "--processes", "1"]) == 0
    (entry,) = read_results(results, "causality")["results"]
    assert set(entry["as trained"]) == set(entry["stepwise"]) == {"64:8", "128:16"}
    assert entry["decoding"] < 1e-3
    assert (tmp_path / "c.svg").is_file()
    cell = out / "cells" / "rewriting-block16-seed0.json"
    before = cell.stat().st_mtime_ns
    assert main(["analyze", "causality", *options, "--only-read"]) == 0
    assert cell.stat().st_mtime_ns == before
    capsys.readouterr()
    assert main(["analyze", "causality", *options[:-4], "--steps", "9", "--out", str(out)]) == 2
    assert "other settings (steps: 2, now 9); choose another --out" in capsys.readouterr().err


def test_one_task_fills_the_figure():
    result = {"cell": {"task": "text", "block_size": 1, "seed": 0}, "as trained": {"length 64": 2.0}}
    figure = causality.draw({"results": [result | {"stepwise": {"length 64": 2.0}}]})
    assert len(figure.axes) == 1

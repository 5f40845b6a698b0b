"""`mdn bench serve` in a short form: every model and batch size is measured, and recurrent memory is flat."""

from __future__ import annotations

import shlex
import subprocess
import sys

from mdn.bench.serving import HYBRID, MODELS, REFERENCE
from mdn.bench.serving_page import fill
from mdn.common.results import read_results

SHORT = (
    "bench serve --batches 1,3 --contexts 64,300 --prompt 20 --answer 4 --hidden-size 128 --rounds 1 "
    "--json serve.json --plot serve.png"
)


def test_the_benchmark_measures_speed_latency_and_memory_of_every_model(tmp_path):
    command = [sys.executable, "-m", "mdn", *shlex.split(SHORT)]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    record = read_results(tmp_path / "serve.json", "serve")
    assert [(row["model"], row["batch"]) for row in record["rows"]] == [(m, b) for b in (1, 3) for m in MODELS]
    for row in record["rows"]:
        assert row["tokens per second"] > 0
        for what in ("first token", "next token"):
            assert 0 < row[f"{what} p50"] <= row[f"{what} p95"] <= row[f"{what} p99"]
    held = {(row["model"], row["context"]): row["bytes per sequence"] for row in record["memory"]}
    for model in (REFERENCE, "gated_deltanet"):
        assert 0 < held[model, 64] == held[model, 300]
    for model in (HYBRID, "attention"):
        assert held[model, 64] < held[model, 300]
    sizes = record["parameters"].values()
    assert max(sizes) < 1.01 * min(sizes)
    assert all(model in printed for model in MODELS)
    assert (tmp_path / "serve.png").stat().st_size > 0
    assert REFERENCE in fill("<!-- table serve -->\n<!-- end -->\n", record)

"""docs/serving.md says what the record of `mdn bench serve` says."""

from __future__ import annotations

import pytest

from mdn.bench.serving import HYBRID, MODELS, REFERENCE, ServingSize, draw
from mdn.bench.serving_page import fill
from mdn.common.results import read_results
from pages import ROOT

RECORD = ROOT / "benchmarks" / "results" / "serve.json"
PAGE = ROOT / "docs" / "serving.md"


def made_up_record() -> dict:
    """Attention twice as fast as all others, whose memory alone grows."""
    rows, memory = [], []
    for model in MODELS:
        ratio = 2.0 if model == "attention" else 1.0
        latencies = {f"{what} token p{p}": 0.001 * p for what in ("first", "next") for p in (50, 95, 99)}
        rows += [
            {
                "model": model,
                "batch": batch,
                "tokens per second": 100 * batch * ratio,
                "ratio to MDN": ratio,
                **latencies,
            }
            for batch in (1, 4)
        ]
        memory += [
            {"model": model, "context": context, "bytes per sequence": 2**20 * (context if ratio > 1 else 1)}
            for context in (128, 512)
        ]
    machine = {"processor": "a processor", "threads": 2, "load_before": 0.1}
    parameters = dict.fromkeys(MODELS, 1000)
    conditions = {"vllm": "0.32.0", "size": vars(ServingSize()), "machine": machine, "rounds": 3}
    return {**conditions, "parameters": parameters, "rows": rows, "memory": memory}


def test_the_page_has_speeds_as_ratios_latencies_and_memory():
    page = fill("before\n<!-- table serve -->\nold\n<!-- end -->\nafter\n", made_up_record())
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert f"| {REFERENCE} | 100 (1.00) | 400 (1.00) |" in page
    assert "| attention | 200 (2.00) | 800 (2.00) |" in page
    assert f"| {HYBRID} | 4 | 50.0 / 95.0 / 99.0 | 50.0 / 95.0 / 99.0 |" in page
    assert "The memory of a sequence of MDN is the same between 128 and 512 tokens" in page


def test_the_figure_can_be_drawn():
    assert len(draw(made_up_record()).axes) >= 3


def test_a_page_without_a_place_for_the_tables_is_refused():
    with pytest.raises(ValueError, match="table serve"):
        fill("nothing\n", made_up_record())


@pytest.mark.skipif(not RECORD.exists(), reason="not recorded")
def test_the_page_shows_the_record():
    page = PAGE.read_text()
    assert fill(page, read_results(RECORD, "serve")) == page

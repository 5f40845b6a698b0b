"""`mdn bench context-parallel`: bytes are those of the formula, shares are counted, and the page shows the record."""

from __future__ import annotations

import pytest

from mdn.bench.context_parallel import BenchSize, measure_exchange
from mdn.bench.context_parallel_results import by_formula, fill, rule_products, shares_by_formula, summary_share
from mdn.common.results import read_results
from pages import ROOT

SIZE = BenchSize(("momentum_deltanet", "gated_deltanet", "attention"), 32, 2, 16, tokens=24, repeats=1)


def test_a_layer_receives_the_bytes_of_the_formula() -> None:
    for row in measure_exchange(SIZE, ranks=3):  # the middle one sends A
        assert row["received_bytes"] == row["bytes_by_formula"] > 0, row["mixer"]


def test_states_alone_are_two_thirds_of_a_rule_with_wide_heads() -> None:
    whole, states = (rule_products(2, 1024, 1024, outputs) for outputs in (True, False))
    assert states / whole == pytest.approx(2 / 3, rel=0.02)
    assert summary_share(2, 1024, 2048, training=False) == pytest.approx(2 / 3 + 2 / 3, rel=0.02)


def test_the_summary_is_below_half_of_a_mixers_forward_pass_but_not_of_a_rules() -> None:
    for row in shares_by_formula():
        for of_rule, of_mixer, of_block in (row["forward"], row["training"]):
            assert of_block < 0.2 < of_mixer < 0.5 < 1 < of_rule, row["config"]


def test_ulysses_is_counted_for_every_config_and_the_exchange_stops_growing_with_the_tokens() -> None:
    rows = {(row["config"], row["tokens"], row["ranks"]): row for row in by_formula()}
    short, long = rows["mdn_400M", 2**17, 64], rows["mdn_400M", 2**20, 64]
    assert long["summaries"] == short["summaries"]
    assert long["ulysses"] == 8 * short["ulysses"]
    assert long["heads"] == 6


def test_the_tables_of_the_page_are_those_of_the_recorded_results() -> None:
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    assert fill(page, read_results(ROOT / "docs/experiments/data/context_parallel.json", "context-parallel")) == page

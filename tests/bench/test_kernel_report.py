"""The recorded report of `mdn bench kernels`: it meets every bar, and a broken bar is reported."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from mdn.bench.kernel_bars import broken_bars
from mdn.bench.kernel_report import with_totals
from mdn.bench.kernel_tables import fill
from mdn.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report() -> dict:
    return json.loads((ROOT / "benchmarks/results/kernels.json").read_text())


def test_the_tables_of_the_docs_are_those_of_the_recorded_report(report):
    page = (ROOT / "docs/kernels.md").read_text()
    assert fill(page, report) == page


def test_the_recorded_report_meets_every_bar(report):
    assert {row["target"] for row in report["kernels"]} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {row["K"] for row in report["kernels"]} == {128, 256}
    assert {row["target"] for row in report["variants"]} == {"sm_80", "sm_90"}
    assert broken_bars(report) == []


def test_the_recorded_report_has_the_sums_by_which_ops_are_compared(report):
    rows = {name: content for name, content in report.items() if name not in ("estimate_ms", "counts")}
    assert with_totals(rows) == report
    assert set(report["estimate_ms"]) == {"H6_K128_V256", "H6_K256_V512"}
    for times in report["estimate_ms"].values():
        assert set(times) == {"mdn", "gdn", "kda"}
        assert min(times.values()) > 0
    for passes in (report["counts"][op] for op in ("mdn", "gdn", "kda")):
        assert set(passes) == {"forward", "backward", "decode"}
        for which in passes:
            products = passes[which]["mma"]  # a decoding step has none
            assert passes[which]["warp_instructions"] > products
            assert (products > 0) == (which != "decode")
            assert passes[which]["sectors"] >= passes[which]["sectors_distinct"] > 0
            assert passes[which]["wavefronts"] >= passes[which]["wavefronts_ideal"] > 0


def row_of(rows: list[dict], **wanted) -> dict:
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


FAULTS = {
    "7 launches": lambda report: report["launches"].update(backward=7),
    "bytes per token": lambda report: report["bytes_written_per_token_head"]["K128"].update(forward=3001),
    "spills 65 bytes": lambda report: row_of(report["kernels"], K=128, target="sm_80").update(spill_bytes=65),
    "(given p) spills": lambda report: row_of(report["variants"], variant="given p").update(spill_bytes=65),
    "loads after a wait": lambda report: row_of(report["kernels"], name="decode").update(loads_after_a_wait=1),
    "times gdn": lambda report: row_of(report["estimates"], target="sm_90", op="mdn").update(ms=100.0),
    "warp instructions on sm_90": lambda report: row_of(report["executed"], target="sm_90").update(
        warp_instructions=701.0
    ),
    "without bank conflicts": lambda report: row_of(report["executed"], name="prepare").update(wavefronts=1e4),
    "operand in registers": lambda report: row_of(report["kernels"], target="sm_90").update(register_products=1),
    "bytes of shared memory": lambda report: row_of(report["variants"], target="sm_80").update(shared_bytes=200_000),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_broken_bar_is_reported(report, message):
    damaged = copy.deepcopy(report)
    FAULTS[message](damaged)
    assert any(message in found for found in broken_bars(damaged))


def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    assert main(["bench", "kernels", "--json", str(tmp_path / "file" / "kernels.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err

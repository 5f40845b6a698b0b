"""The recorded report of `mdn bench kernels`: it is one of the code as it is, meets every bar, and a broken bar is
reported."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdn.bench.kernel_bars import broken_bars
from mdn.bench.kernel_report import VALUE_DIM, with_totals
from mdn.bench.kernel_tables import fill, tables_of
from mdn.bench.kernels import PASSES, VARIANTS, Variant
from mdn.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report() -> dict:
    return json.loads((ROOT / "benchmarks/results/kernels.json").read_text())


def test_the_tables_of_the_docs_are_those_of_the_recorded_report(report):
    pages = [(ROOT / "docs" / name).read_text() for name in ("kernels.md", "kernel-tables.md")]
    assert [fill(page, report) for page in pages] == pages
    placed = [name for page in pages for name in re.findall(r"<!-- table ([\w-]+) -->", page)]
    assert sorted(placed) == sorted(tables_of(report))


def test_the_recorded_report_meets_every_bar(report):
    assert {row["target"] for row in report["kernels"]} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {row["K"] for row in report["kernels"]} == {128, 256}
    assert {row["target"] for row in report["variants"]} == {"sm_80", "sm_90"}
    assert broken_bars(report) == []


Tiles = list[tuple[str, int | None, int, int]]
"""(kernel, V columns of a program if it says so, warps, stages) of every launch"""


def tiles_now(target: str, run: Callable[[], None]) -> Tiles:
    """Of the launches that ``run`` makes with the code as it is; nothing is compiled."""
    from mdn.ops.triton.host import intercept_launches
    from mdn.ops.triton.tiles import assume_target

    seen: list[Any] = []
    with assume_target(target), intercept_launches(seen.append):
        run()
    return [(x.name, x.arguments.get("BV"), x.tile.warps, x.tile.stages) for x in seen]


def tiles_recorded(rows: list[dict], **wanted: str | int) -> Tiles:
    mine = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return [(row["name"], row["columns"], row["warps"], row["stages"]) for row in mine]


def test_the_recorded_tiles_are_those_of_the_code(report):
    """After a change of tiles.py: `mdn bench kernels` again, with the command of docs/kernels.md."""
    pytest.importorskip("triton")
    from mdn.bench.gpu.counts import LARGE, SIZE
    from mdn.bench.gpu.estimate import SIZES
    from mdn.bench.gpu.runs import decode_mdn, run_mdn

    def run_all(variant: Variant) -> None:
        for which in PASSES:
            variant.run(which)

    for target, K in {(row["target"], row["K"]): None for row in report["kernels"]}:
        variant = Variant(key_dim=K, value_dim=VALUE_DIM)
        assert tiles_recorded(report["kernels"], target=target, K=K) == tiles_now(target, partial(run_all, variant))
    named = {variant.name: variant for variant in VARIANTS}
    for target, name in {(row["target"], row["variant"]): None for row in report["variants"]}:
        recorded = tiles_recorded(report["variants"], target=target, variant=name)
        assert recorded == tiles_now(target, partial(run_all, named[name])), name
    for target in ("sm_90", "sm_80"):
        for size, _ in SIZES:
            recorded = tiles_recorded(report["estimates"], op="mdn", target=target, size=str(size))
            assert recorded == tiles_now(target, partial(run_mdn, size, 128))
        for rows, size in ((report["executed"], SIZE), (report["executed_large"], LARGE)):
            now = tiles_now(target, partial(run_mdn, size, 128)) + tiles_now(target, partial(decode_mdn, size))
            assert sorted(tiles_recorded(rows, op="mdn", target=target)) == sorted(now)


def test_the_recorded_report_says_where_it_comes_from(report):
    origin = report["provenance"]
    assert origin["command"] == report["command"]
    assert "bench kernels" in origin["command"]
    assert origin["versions"]["triton"] == report["triton"]
    assert {"momentum-deltanet", "torch", "ptxas", "ptxas-blackwell", "fla-core"} <= set(origin["versions"])
    assert datetime.fromisoformat(origin["finished"])
    assert re.match("[0-9a-f]{40}", origin["commit"])


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
    "decode (batch 1, K=256, V=512) issues": lambda report: row_of(
        report["variants"], name="decode", variant="batch 1, K=256, V=512"
    ).update(loads_after_a_wait=1),
    "on gfx942 at K=128": lambda report: row_of(report["kernels"], K=128, target="gfx942").update(spill_bytes=65),
    "times gdn": lambda report: row_of(report["estimates"], target="sm_90", op="mdn").update(ms=100.0),
    "warp instructions on sm_90": lambda report: row_of(report["executed"], target="sm_90").update(
        warp_instructions=701.0
    ),
    "without bank conflicts": lambda report: row_of(report["executed"], name="prepare").update(wavefronts=1e4),
    "K=256, V=512): 2.00 times the wavefronts": lambda report: report.update(
        executed_large=[dict(row_of(report["executed"], name="prepare"), wavefronts=2.0, wavefronts_ideal=1.0)]
    ),
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

"""`mdn bench op`: what it prints and writes, and that a wrong peer stops it before any figure is shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mdn.bench import op, op_general, op_peers
from mdn.bench.op_accuracy import accuracy_table
from mdn.bench.op_results import CONTROL, fill_general, tables, too_busy
from mdn.cli import main
from mdn.common.results import read_results


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("bench")
    arguments = ["bench", "op", "--quick", "--threads", "1", "--json", str(folder / "op.json")]
    return main([*arguments, "--plot", str(folder / "op.png")]), folder


def test_a_quick_run_writes_json_and_both_plots(quick_run: tuple[int, Path]) -> None:
    code, folder = quick_run
    assert code == 0
    assert (folder / "op.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "op.svg").read_text()[:1000]
    results = json.loads((folder / "op.json").read_text())
    assert results["machine"]["threads"] == 1
    for row in results["shapes"]:
        assert row["seconds"][op_peers.OURS] > 0
        assert row["times_faster_torch"][op_peers.OURS] == 1
    assert {row["peer"] for row in results["packing"]} <= {op_peers.OURS, op_peers.NATIVE}


def test_every_peer_has_a_time_or_a_reason(quick_run: tuple[int, Path]) -> None:
    results = json.loads((quick_run[1] / "op.json").read_text())
    assert set(results["shapes"][0]["seconds"]) | set(results["not_runnable"]) == set(op_peers.FORWARDS)
    assert all(results["not_runnable"].values())
    assert op_peers.PAPER in results["correctness"]
    assert op_peers.FIRST_ORDER in results["correctness"]


def test_a_wrong_result_stops_the_benchmark_before_any_figure(monkeypatch, capsys, tmp_path: Path) -> None:
    right = op_peers.FORWARDS[op_peers.OURS]
    monkeypatch.setitem(op_peers.FORWARDS, op_peers.OURS, lambda x: right(x) * 1.0001)
    monkeypatch.setattr(op_peers, "runnable_peers", lambda: ([op_peers.OURS], {}))
    code = main(["bench", "op", "--quick", "--json", str(tmp_path / "op.json")])
    assert code == 1
    printed = capsys.readouterr().out
    assert "mdn torch is off by 1.0e-04 from its definition; nothing is reported" in printed
    assert "ms" not in printed
    assert not (tmp_path / "op.json").exists()


def test_the_accuracy_table_shows_ours_exact_and_the_quotients_broken(capsys, tmp_path: Path) -> None:
    rows = accuracy_table((-0.1, -20.0))
    for row in rows:
        assert row[op_peers.OURS] <= 2e-6
    assert rows[0][op_peers.PAPER_SOLVE] < 1e-4
    assert not rows[1][op_peers.PAPER_SOLVE] < 1e-2  # NaN counts as broken
    assert main(["bench", "op", "--accuracy", "--json", str(tmp_path / "a.json")]) == 0
    assert "-inf" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["accuracy"][-1]["log_mu"] == "-inf"


def test_flops_are_counted_as_four_and_nine_gigaflop_at_the_first_shape() -> None:
    assert op.WIDE.flops() / 1e9 == pytest.approx(13.4, abs=0.15)


def test_saved_bytes_at_the_head_sizes_of_the_bar_are_below_6000() -> None:
    """q, k, v, R and four gates: (128 + 128 + 256 + 256 + 4) * 4 bytes."""
    measured = op.saved_bytes(op_peers.OURS, op_peers.RuleShape(1, 128, 4, 128, 256))
    assert measured == (128 + 128 + 256 + 256 + 4) * 4


def test_threads_are_not_judged_on_a_machine_that_has_no_second_core() -> None:
    quiet, busy = ({CONTROL: control, op_peers.NATIVE: 1.2} for control in (1.9, 0.8))
    assert not too_busy(quiet)
    assert too_busy(busy)
    (table,) = [table for table in tables(recorded(scaling=busy)) if table.caption.startswith("from one thread")]
    assert "means nothing in this run: the machine is too busy" in table.caption
    (judged,) = [bar for bar in op.bars(recorded(scaling=busy)) if bar["what"] == op.THREADS]
    assert judged["met"] is None
    (judged,) = [bar for bar in op.bars(recorded(scaling=quiet)) if bar["what"] == op.THREADS]
    assert judged["met"] is False


def recorded(**changes: object) -> dict:
    """The recorded run with some results replaced."""
    content = read_results(Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "op.json", "op")
    content["lengths"] = {name: {int(t): x for t, x in row.items()} for name, row in content["lengths"].items()}
    return content | changes


def test_bad_arguments_are_one_line_and_exit_code_2(capsys) -> None:
    assert main(["bench", "op", "--threads", "0"]) == 2
    error = capsys.readouterr().err
    assert "--threads must be at least 1" in error
    assert len(error.splitlines()) == 1
    assert main(["bench", "op", "--accuracy", "--plot", "x.png"]) == 2
    assert "--plot draws times" in capsys.readouterr().err


def test_the_options_of_the_general_rule_are_measured_beside_the_plain_one(capsys, tmp_path: Path) -> None:
    assert main(["bench", "op", "--general", "--quick", "--json", str(tmp_path / "general.json")]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in op_general.forms())
    content = json.loads((tmp_path / "general.json").read_text())["general"]
    assert set(content["correctness"]) == set(content["seconds"]) == set(op_general.forms())
    assert main(["bench", "op", "--general", "--accuracy"]) == 2


def test_the_bars_of_the_general_rule_are_judged() -> None:
    seconds = dict.fromkeys(op_general.forms(), 1.0) | {"momentum, vector decays": 1.7}
    peak = {"KDA": 100, "momentum, vector decays": 160, "momentum, vector decays, direct write": 160}
    judged = op_general.bars({"seconds": seconds, "peak_bytes": peak, "shape": "short", "long_shape": "long"})
    met = {bar["what"]: bar["met"] for bar in judged}
    assert met["momentum, torch, direct write: time over the plain rule"]
    assert not met["momentum, vector decays: time over KDA, short"]
    assert met["momentum, vector decays: peak memory over KDA, long"]


def test_the_tables_of_the_general_rule_are_those_of_the_record() -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert fill_general(page, read_results(folder / "results" / "op_general.json", "op")) == page


def test_a_form_that_leaves_its_recurrence_is_not_timed(monkeypatch) -> None:
    form = op_general.forms()["KDA"]
    wrong = dataclasses.replace(form, recurrence=lambda **inputs: (1.001 * form.recurrence(**inputs)[0], None))
    with pytest.raises(RuntimeError, match="KDA is off by"):
        op_general.check_correct(wrong)


def test_a_step_that_holds_a_matrix_is_seen_in_the_peak_memory(monkeypatch) -> None:
    def holds_a_matrix(form, shape):
        return lambda: torch.ones(shape.time, 2**18).sum()  # T MiB

    monkeypatch.setattr(op_general, "training_step", holds_a_matrix)
    grown = op_general._grown_by_a_step("KDA", op_peers.RuleShape(1, 128, 1, 1, 1))
    assert grown is None or grown >= 50 * 2**20

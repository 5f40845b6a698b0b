"""`mdn bench op`: what it prints and writes, and that a wrong peer stops it before any figure is shown."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mdn.bench import op, op_general, op_peers, timing
from mdn.bench.op_accuracy import accuracy_table
from mdn.bench.op_results import CONTROL, draw, fill_general, remarks, tables, too_busy
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
    assert "gpu" not in results["machine"]
    assert "GPU" in results["not_runnable"][op_peers.TRITON]


def test_every_peer_has_a_time_or_a_reason(quick_run: tuple[int, Path]) -> None:
    results = json.loads((quick_run[1] / "op.json").read_text())
    assert set(results["shapes"][0]["seconds"]) | set(results["not_runnable"]) == set(op_peers.FORWARDS)
    assert all(results["not_runnable"].values())
    assert op_peers.PAPER in results["correctness"]
    assert op_peers.FIRST_ORDER in results["correctness"]


def test_everything_is_measured_on_the_device_that_was_asked_for() -> None:
    """Meta tensors do not mix with those of the CPU, and take no time."""
    names = [name for name in op_peers.FORWARDS if name not in (op_peers.NATIVE, op_peers.TRITON, op_peers.FLA)]
    shape = op_peers.RuleShape(1, 64, 2, 16, 16)
    for name in names:
        assert {x.device.type for x in op_peers.make_inputs(shape, device="meta").values()} == {"meta"}
        assert op.saved_bytes(name, shape, "meta") >= 0
    assert set(op.measure_shape(shape, names, quick=True, device="meta")["seconds"]) == set(names)
    assert set(op.measure_lengths(shape, names, quick=True, device="meta")) == set(names)
    assert op.measure_packing(shape, names, quick=True, device="meta")
    assert set(op.measure_decode(names, quick=True, device="meta")["rows"][0]["seconds"]) == {
        op_peers.OURS,
        "scale both states",
    }


def test_a_record_from_a_gpu_has_neither_threads_nor_bars(monkeypatch) -> None:
    """What ``run`` does with a GPU, which is the CPU here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def without_device(module, name: str) -> None:
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: right(*arguments[:-1]))

    for name in ("runnable_peers", "check_correct"):
        without_device(op_peers, name)
    for name in ("measure_shape", "measure_lengths", "measure_packing", "measure_decode", "saved_bytes"):
        without_device(op, name)
    monkeypatch.setattr(op, "accuracy_table", lambda device: accuracy_table((-0.1,)))
    results = op.run(quick=True, device="cuda")
    assert (results["scaling"], results["bars"]) == ({}, [])
    assert not any(table.caption.startswith("from one thread") for table in tables(results))
    assert next(remarks(results)).startswith("a GPU, torch")


def test_the_precision_is_that_of_the_peers_that_were_measured() -> None:
    plain = recorded()
    assert ", float32, forward + backward" in next(remarks(plain))
    assert draw(plain).axes[0].get_title() == "Forward + backward, float32"
    on_gpu = recorded(lengths=plain["lengths"] | {op_peers.TRITON: {512: 1.0}})
    assert ", float32 unless a peer says bfloat16, forward + backward" in next(remarks(on_gpu))
    assert draw(on_gpu).axes[0].get_title() == "Forward + backward, float32 unless a peer says bfloat16"


def test_a_call_is_timed_from_the_end_of_the_one_before_it(monkeypatch) -> None:
    """A GPU works on after a call has returned."""
    events: list[str] = []
    monkeypatch.setattr(timing, "_wait_for_device", lambda: events.append("wait"))
    timing.interleaved({"a": lambda: events.append("a"), "b": lambda: events.append("b")}, repeats=1)
    assert events == ["a", "b", "wait", "a", "wait", "b", "wait"]
    events.clear()
    timing.interleaved({"a": lambda: events.append("a")}, repeats=1, untimed=2)
    assert events == ["a", "wait"] + 3 * ["a", "wait"]


def test_a_wrong_result_stops_the_benchmark_before_any_figure(monkeypatch, capsys, tmp_path: Path) -> None:
    right = op_peers.FORWARDS[op_peers.OURS]
    monkeypatch.setitem(op_peers.FORWARDS, op_peers.OURS, lambda x: right(x) * 1.0001)
    monkeypatch.setattr(op_peers, "runnable_peers", lambda device: ([op_peers.OURS], {}))
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
    assert main(["bench", "op", "--device", "tpu"]) == 2
    assert "--device" in capsys.readouterr().err
    assert main(["bench", "op", "--general", "--device", "cuda"]) == 2
    assert "leave out --device" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("only", [[], ["--accuracy"]])
def test_a_gpu_that_is_not_there_is_one_line_and_exit_code_2(only: list[str], capsys) -> None:
    assert main(["bench", "op", "--device", "cuda", *only]) == 2
    error = capsys.readouterr().err
    assert "--device cuda needs a GPU, and torch finds none here" in error
    assert len(error.splitlines()) == 1


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


HOLDS_A_MATRIX = """
import torch
from mdn.bench import op_general
from mdn.bench.op_peers import RuleShape

op_general.training_step = lambda form, shape: lambda: torch.ones(shape.time, 2**18).sum()  # T MiB
print(op_general._grown_by_a_step("KDA", RuleShape(1, 128, 1, 1, 1)))
"""


def test_a_step_that_holds_a_matrix_is_seen_in_the_peak_memory() -> None:
    """In a fresh process, as `peak_bytes` has it: the peak of this one may lie above what the step adds."""
    done = subprocess.run([sys.executable, "-c", HOLDS_A_MATRIX], capture_output=True, text=True, check=True)
    grown = done.stdout.split()[-1]
    assert grown == "None" or int(grown) >= 50 * 2**20

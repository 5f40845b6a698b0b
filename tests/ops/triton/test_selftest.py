"""The self-test for GPUs, without one: each way in which a check can fail, what is said about the machine, and the
notice of the first call of a kernel."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mdn
from mdn.common import source
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState
from mdn.ops.triton import host, selftest, tiles
from mdn.ops.triton.selftest import Check
from triton_interpreted import run_interpreted

STAND_INS = """
import os, sys
import torch
from mdn.ops.triton import selftest
from mdn.ops.triton.selftest import Check

def wrong_address():
    os.kill(os.getpid(), 11)

def exception():
    raise RuntimeError("an illegal memory access was encountered")

def quiet_end():
    os._exit(0)

one, none = torch.ones(3), torch.zeros(3)
selftest.all_checks = lambda device: [
    Check("right", 0.1, lambda: selftest.largest_error([one, one], [one, one])),
    Check("over the bar", 0.1, lambda: selftest.largest_error([one, none], [one, one])),
    Check("NaN", 0.1, lambda: selftest.largest_error([one, none / 0, one], [one, one, one])),
    Check("segmentation fault", 0.1, wrong_address),
    Check("exception", 0.1, exception),
    Check("no result", 0.1, quiet_end),
    Check("right again", 0.1, lambda: 0.0),
]
if __name__ == "__main__":
    sys.exit(selftest.main(sys.argv[1:]))
"""
NAMES = re.findall(r'Check\("(.*?)"', STAND_INS)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the self-test prints about the checks above, by name, and its last lines."""
    folder = tmp_path_factory.mktemp("selftest")
    script, file = folder / "stand_ins.py", folder / "report.txt"
    script.write_text(STAND_INS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(selftest, "COMMAND", [sys.executable, "-W", "ignore", str(script)])
        patch.setattr(selftest, "all_checks", lambda device: [Check(name, 0.1, lambda: 0.0) for name in NAMES])
        code = selftest.main([str(file)])
    written = file.read_text().splitlines()
    lines = [line for line in written if not line.endswith(": running ...")]
    starts = [next(i for i, line in enumerate(lines) if line.startswith(f"{name:<38}")) for name in NAMES]
    ends = [*starts[1:], len(lines) - 2]
    about = {name: "\n".join(lines[start:end]) for name, start, end in zip(NAMES, starts, ends)}
    return SimpleNamespace(code=code, about=about, lines=lines, written=written)


def test_every_check_is_named_when_it_starts(report):
    """Building its kernels may take minutes, and what the process says about it is shown only if it fails."""
    announced = [line.removesuffix(": running ...") for line in report.written if line.endswith(": running ...")]
    assert announced == NAMES
    for name in NAMES:
        after = report.written[report.written.index(f"{name}: running ...") + 1]
        assert after.startswith(f"{name:<38}")


def test_checks_before_and_after_a_failure_run_and_pass(report):
    for name in ("right", "right again"):
        assert re.fullmatch(rf"{name} +0\.0e\+00 +1e-01 +\d+\.\d", report.about[name])
    assert report.code == 1
    assert report.lines[-2] == f"2 of {len(NAMES)} passed"


def test_an_error_over_the_bar_fails(report):
    assert re.fullmatch(r"over the bar +1\.0e\+00 +1e-01 +\d+\.\d +FAILED", report.about["over the bar"])


def test_nan_fails_wherever_it_is(report):
    assert re.fullmatch(r"NaN +nan +1e-01 +\d+\.\d +FAILED", report.about["NaN"])


def test_a_crash_is_reported_with_what_the_process_said_last(report):
    assert re.match(r"segmentation fault +CRASHED: Segmentation fault\n", report.about["segmentation fault"])
    assert "in wrong_address" in report.about["segmentation fault"]
    assert re.match(r"exception +CRASHED: exit code 1\n", report.about["exception"])
    assert report.about["exception"].endswith("RuntimeError: an illegal memory access was encountered")
    assert re.match(r"no result +CRASHED: exit code 0", report.about["no result"])


def test_a_check_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(selftest, "COMMAND", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(selftest, "TIME_LIMIT", 2)
    said = []
    assert not selftest.run_apart(Check("endless", 0.1, float), said.append)
    assert said == ["endless: running ...", f"{'endless':<38}   NO ANSWER after 2 seconds"]


def test_the_report_is_on_disk_after_every_check(tmp_path, monkeypatch):
    """If the machine goes down with a check, what came before it is known."""
    file = tmp_path / "report.txt"
    found = []
    monkeypatch.setattr(selftest, "run_apart", lambda check, say: say(check.name) or found.append(file.read_text()))
    selftest.report([Check("first", 0.0, float), Check("second", 0.0, float)], [], file)
    assert "10 to 20 minutes" in found[0]
    assert found[0].endswith("first\n")
    assert found[1].endswith("first\nsecond\n")


def test_the_name_of_a_single_check_must_be_known(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        selftest.main(["--only", "unknown"])
    assert "float32, K=V=64; " in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- machines


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there."""

    def pretend(capability, hip=None):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        monkeypatch.setattr(torch.version, "hip", hip)
        return selftest.describe(torch.device("cuda"))

    return pretend


@pytest.mark.parametrize(("capability", "assembler"), [((8, 0), "ptxas"), ((10, 0), "ptxas-blackwell")])
def test_the_description_names_the_release_of_the_assembler_that_triton_calls(gpu, capability, assembler):
    _, _, machine, line = gpu(capability)
    assert machine.startswith("A GPU, compute capability {}.{}, CUDA 13.0, driver ".format(*capability))
    variable = f"TRITON_{assembler.upper().replace('-', '_')}_PATH"
    assert re.fullmatch(rf".*/{assembler}: Cuda .* release \d+\.\d+, V[\d.]+ \({variable} replaces it\)", line)


def test_the_description_names_the_assembler_that_replaces_tritons(gpu, monkeypatch, tmp_path):
    other = tmp_path / "another-ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.2'\necho Build\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(other))
    assert f"{other}: Cuda compilation tools, release 99.1, V99.1.2 (" in gpu((10, 0))[-1]
    assert "99.1" not in gpu((8, 0))[-1]


def test_the_description_of_a_rocm_machine_has_nothing_of_nvidias(gpu):
    _, _, machine = gpu((9, 4), hip="7.1.2")
    assert machine.startswith("A GPU, gfx942:sramecc+:xnack-, HIP 7.1.2, driver ")
    assert "nvidia" not in machine.lower()


def test_the_driver_of_a_rocm_machine_is_named_or_unknown(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "AMD_DRIVER", tmp_path / "version")
    assert re.search(r", driver unknown \(Linux .+\)$", gpu((9, 4), hip="7.1.2")[-1])
    (tmp_path / "version").write_text("6.10.5\n")
    assert gpu((9, 4), hip="7.1.2")[-1].endswith(", driver 6.10.5")


def test_the_description_begins_with_our_version_and_commit(gpu, monkeypatch):
    monkeypatch.setattr(source, "source_commit", lambda: None)
    assert gpu((8, 0))[0] == f"momentum-deltanet {mdn.__version__}, commit unknown"
    monkeypatch.setattr(source, "source_commit", lambda: "0123abc")
    assert gpu((8, 0))[0].endswith(", commit 0123abc")


# ------------------------------------------------------------------------------------------------- the notice


@pytest.fixture
def notices(caplog, monkeypatch):
    """Runs a pass on tensors of a GPU that is not there, its kernels left out, and gives what was logged."""
    host.announce_build.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options = RuleOptions(scale=0.25)

    def run(which, key_dim=16):
        with FakeTensorMode(), tiles.assume_target("sm_90"), host.intercept_launches(lambda launch: None):
            shape = (1, 5, 2) if which != "step" else (1, 2)
            gates = [torch.empty(shape, device="cuda") for _ in range(4)]
            q, k, v = (torch.empty(*shape, width, device="cuda") for width in (key_dim, key_dim, 32))
            tensors = RuleTensors(q, k, v, None, *gates)
            if which == "forward":
                host.forward(tensors, None, options, False)
            elif which == "backward":
                host.backward(v, None, tensors, v, None, options)
            else:
                S, M = (torch.empty(1, 2, key_dim, 32, device="cuda") for _ in range(2))
                host.step_(tensors, StepState(S, M), options)
        return [record.getMessage() for record in caplog.records if record.name == "mdn"]

    with caplog.at_level(logging.WARNING, logger="mdn"):
        yield run
    host.announce_build.cache_clear()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("forward", "the forward pass for K=16, V=32, float32: about 20 seconds"),
        ("backward", "the backward pass for K=16, V=32, float32: about 60 seconds"),
        ("step", "the decoding step for K=16, V=32, float32: about 10 seconds"),
    ],
)
def test_the_first_call_says_once_how_many_seconds_its_kernels_take_to_build(notices, which, words):
    notices(which)
    (notice,) = notices(which)
    assert f"Triton builds the kernels of {words}" in notice


def test_another_width_is_announced_anew_because_its_kernels_are_others(notices):
    notices("step")
    assert [re.search("K=[0-9]+", notice)[0] for notice in notices("step", key_dim=32)] == ["K=16", "K=32"]


# ---------------------------------------------------------------------------------------------------------- the whole


def run_selftest(*arguments, **options):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "mdn.ops.triton.selftest", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def test_one_check_of_the_self_test_runs_under_the_interpreter_and_prints_its_error():
    done = run_selftest("--only", "decode, torch.float32")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r'\{"error": [0-9.]+e-\d\d, "seconds": [0-9.]+\}\n', done.stdout)


@pytest.fixture(scope="module")
def gpu_checks():
    return run_interpreted("selftest_checks.py")


def test_repeats_are_compared_bit_for_bit(gpu_checks):
    assert gpu_checks["repeats"] == {"as it is": 0, "a bit differs": "inf", "NaN": "nan"}


def test_the_graph_check_compares_what_a_replay_leaves_with_the_step_itself(gpu_checks):
    assert gpu_checks["graph"]["as it is"] == 0
    assert gpu_checks["graph"]["launches"] == [1, 1]
    assert not gpu_checks["graph"]["nothing replayed"] <= 1e-6


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_self_test_passes_under_the_interpreter(tmp_path):
    done = run_selftest("report.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == (tmp_path / "report.txt").read_text()
    assert "Triton's interpreter on the CPU" in done.stdout
    assert re.search(r"^generate with a tiny model +0\.0e\+00", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("16 of 16 passed\nplease send report.txt back, whatever it says\n")

"""Loading the native kernel, its threads, forks, and what happens where it was not built."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from definition import make_inputs
from mdn.ops import cpu
from mdn.ops.cpu import bindings
from mdn.ops.momentum.interface import RuleOptions, RuleTensors

OPTIONS = RuleOptions(scale=0.125)


def inputs(B: int = 2, T: int = 150, K: int = 64, V: int = 64, seed: int = 0) -> RuleTensors:
    return RuleTensors(**make_inputs(B=B, T=T, K=K, V=V, seed=seed), p=None)


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch):
    """Loads again with the environment of the test, and once more afterwards."""
    bindings._find.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    bindings._find.cache_clear()


def has_compiler() -> bool:
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    return compiler is not None and subprocess.run([compiler, "--version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_the_kernel_is_built_where_a_compiler_is_and_the_best_variant_is_chosen() -> None:
    assert cpu.why_unavailable() is None
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_vnni_supported():
        assert cpu.instruction_set() == "avx512vnni"
    elif capability in ("AVX2", "AVX512"):
        assert cpu.instruction_set() == capability.lower()


def test_a_missing_library_is_explained(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_library.setenv("MDN_CPU_LIBRARY_DIR", str(tmp_path))
    assert "C++ compiler" in cpu.why_unavailable()
    assert cpu.instruction_set() is None
    with pytest.raises(RuntimeError, match="native CPU kernel cannot be used"):
        cpu.forward(inputs(T=2), None, OPTIONS, False)


@pytest.mark.native
def test_a_broken_library_is_explained(fresh_library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_kernel_baseline.so").write_bytes(b"not a library")
    fresh_library.setenv("MDN_CPU_LIBRARY_DIR", str(tmp_path))
    assert "does not load" in cpu.why_unavailable()


@pytest.mark.native
@pytest.mark.parametrize("name", ["sse9", "avx512"])
def test_an_instruction_set_that_cannot_be_used_is_refused(fresh_library: pytest.MonkeyPatch, name: str) -> None:
    fresh_library.setenv("MDN_CPU_ISA", name)
    supported = name == "avx512" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert (cpu.why_unavailable() is None) == supported


class LongerProblem(bindings.Problem):
    _fields_ = (("added", ctypes.c_int64),)


OTHER_STRUCTS = {**bindings.STRUCTS, "mdn_interface": (LongerProblem, bindings.Step, bindings.Linear)}


@pytest.mark.native
@pytest.mark.parametrize("change", [{"INTERFACE_VERSION": 99}, {"STRUCTS": OTHER_STRUCTS}])
def test_a_library_built_from_other_sources_is_refused(
    fresh_library: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    """As after pulling new sources into an editable install without building them."""
    for name, value in change.items():
        fresh_library.setattr(bindings, name, value)
    reason = cpu.why_unavailable()
    assert reason is not None
    assert "built from other sources" in reason
    assert "build_ext --inplace" in reason
    with pytest.raises(RuntimeError, match="rebuild it"):
        cpu.forward(inputs(T=2), None, OPTIONS, False)


def test_importing_the_backend_loads_no_library() -> None:
    code = "import mdn.ops.cpu as cpu, mdn.ops.cpu.bindings as l; assert l._find.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def one_call(seed: int) -> torch.Tensor:
    given = inputs(seed=seed)
    o, state, residual = cpu.forward(given, None, OPTIONS, True)
    gradients = cpu.backward(o, state, given, residual, None, OPTIONS)
    return torch.cat([x.flatten() for x in (o, state, *gradients) if x is not None])


@pytest.mark.native
def test_several_python_threads_may_call_at_once() -> None:
    expected = [one_call(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(one_call, [seed for _ in range(5) for seed in range(4)]))
    for index, result in enumerate(actual):
        assert torch.equal(result, expected[index % 4])


def _child(connection, given: RuleTensors, threads: int) -> None:
    """Only the kernel runs here: torch's own parallel operations would wait for threads that a child does not have."""
    if threads:
        torch.set_num_threads(threads)
    o, state, residual = cpu.forward(given, None, OPTIONS, True)
    gradients = cpu.backward(o, state, given, residual, None, OPTIONS)
    connection.send([gradient.flatten()[:50].tolist() for gradient in gradients if gradient is not None])


@pytest.mark.native
@pytest.mark.parametrize("threads", [0, 1])
def test_a_forked_child_can_call_after_the_parent_did(threads: int) -> None:
    """As in a DataLoader worker, which sets one thread, and in a child that keeps all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    given = inputs()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    here, there = context.Pipe(duplex=False)
    try:
        _child(there, given, 0)
        child = context.Process(target=_child, args=(sender, given, threads))
        child.start()
        answered = receiver.poll(60)
        if not answered:
            child.kill()
        child.join(10)
        assert answered, "the forked child hangs"
        assert receiver.recv() == here.recv()
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


FIRST_USE_IN_A_CHILD = """
import os, signal, torch
from definition import make_inputs
from mdn.ops import cpu
from mdn.ops.momentum.interface import RuleOptions, RuleTensors

torch.set_num_threads(2)
given = RuleTensors(**make_inputs(B=2, T=150, K=64, V=64), p=None)
torch.ones(1 << 20).exp()  # starts the threads of torch, which a child does not have
assert cpu.bindings._find.cache_info().currsize == 0
child = os.fork()
if child == 0:
    signal.alarm(60)
    cpu.forward(given, None, RuleOptions(scale=0.125), True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.native
def test_a_forked_child_can_be_the_first_to_call() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", FIRST_USE_IN_A_CHILD], check=True, timeout=120, env=environment)


@pytest.mark.native
def test_denormals_are_restored_after_a_call() -> None:
    one_call(1)
    smallest = torch.tensor([1e-40])
    assert (smallest * 1.0).item() != 0


@pytest.mark.native
def test_memory_of_inference_tensors_can_be_used() -> None:
    expected = one_call(2)
    with torch.inference_mode():
        assert torch.equal(one_call(2), expected)


def test_the_install_succeeds_without_a_compiler(tmp_path: Path) -> None:
    """build_ext with a compiler that does not exist: a warning, no library, exit code 0."""
    root = Path(__file__).parents[3]
    environment = os.environ | {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path / "lib"),
        "--build-temp",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
    assert "failed" in done.stderr

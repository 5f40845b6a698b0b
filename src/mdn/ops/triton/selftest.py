"""`python -m mdn.ops.triton.selftest [FILE]`: the kernels on the GPU that is here, through the public functions.

Every check runs in a process of its own, with a time limit: after an illegal memory access a process cannot use the GPU
any more, and a check that crashes or hangs must not hide the others. Errors are the largest of any output or gradient
against the float64 recurrence, relative to the largest value. Exit code 0 if all pass, 1 if one does not, 2 if there is
nothing to test on. Most of the time is Triton's compiler: 10 to 20 minutes if its cache is empty. The same lines go to
FILE (default mdn-selftest.txt): please send it back in any case.
`--only NAME` runs one check, without isolation. With TRITON_INTERPRET=1 the small checks run, slowly, on the CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mdn
import mdn.ops
from mdn.ops.triton.availability import interpreting, triton_version, why_unavailable
from mdn.ops.triton.tiles import FULL_GPU, assume_heads

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
BITWISE_REPEATS = 20
TIME_LIMIT = 900
"""seconds for one check, which include building its kernels"""
AMD_DRIVER = Path("/sys/module/amdgpu/version")
COMMAND = [sys.executable, "-m", "mdn.ops.triton.selftest"]
"""what starts a check in a process of its own, with ``--only NAME``"""


@dataclass(frozen=True)
class Case:
    """Inputs of one call; lengths make it a pack."""

    name: str
    dtype: torch.dtype
    time: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk_size: int = 64
    given_p: bool = False
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    general: bool = False
    """a direct write and the look-ahead error"""
    wide: bool = False
    """with the tiles of a batch that fills a GPU"""


CASES = (
    Case("float32, K=V=64", torch.float32, 200, 2, 2, 64, 64),
    Case("bfloat16, K=V=64", torch.bfloat16, 200, 2, 2, 64, 64),
    Case("float16, K=V=64", torch.float16, 200, 2, 2, 64, 64),
    Case("bfloat16, K=128, V=256", torch.bfloat16, 300, 2, 2, 128, 256),
    Case("bfloat16, K=256, V=512", torch.bfloat16, 200, 1, 1, 256, 512),
    Case("bfloat16, K=128, V=256, wide tiles", torch.bfloat16, 300, 1, 1, 128, 256, wide=True),
    Case("bfloat16, K=256, V=512, wide tiles", torch.bfloat16, 200, 1, 1, 256, 512, wide=True),
    Case("bfloat16, grouped value heads", torch.bfloat16, 150, 2, 4, 128, 128),
    Case("float32, given p, chunk 32", torch.float32, 100, 1, 2, 64, 48, 32, True),
    Case("float32, chunk 16", torch.float32, 70, 1, 1, 32, 32, 16),
    Case("float32, direct write and look-ahead", torch.float32, 100, 1, 2, 64, 48, 32, general=True),
    Case("bfloat16, pack", torch.bfloat16, 160, 1, 2, 128, 64, 64, False, (0, 1, 90, 64, 0, 5)),
)
LARGE = Case("large", torch.bfloat16, 1024, 16, 16, 128, 256, batch=8)


def make_inputs(case: Case, device: torch.device) -> dict[str, Tensor]:
    """q, k, v, p, an initial state and hostile gates: hard zeros, ones and everything between."""
    generator = torch.Generator().manual_seed(0)

    def rows(heads: int, width: int) -> Tensor:
        shape = (case.batch, case.time, heads, width)
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    def gate() -> Tensor:
        return torch.rand(case.batch, case.time, case.value_heads, generator=generator)

    sequences = case.batch if case.lengths is None else len(case.lengths)
    state = torch.randn(2, sequences, case.value_heads, case.key_dim, case.value_dim, generator=generator)
    tensors = {"q": rows(case.heads, case.key_dim), "k": rows(case.heads, case.key_dim)}
    tensors["v"] = rows(case.value_heads, case.value_dim)
    if case.given_p:
        tensors["p"] = rows(case.heads, case.key_dim)
    tensors["log_alpha"] = torch.where(gate() < 0.05, torch.tensor(-12.0), -0.2 * gate())
    tensors["log_mu"] = torch.where(gate() < 0.1, torch.tensor(-float("inf")), -3.0 * gate() ** 2)
    tensors |= {"beta": 0.5 * gate(), "eta": 1.5 * gate(), "initial_state": state}
    if case.general:
        tensors["direct"] = 0.5 * gate()
    return {name: x.to(device) for name, x in tensors.items()}


def outputs_and_gradients(
    rule: Callable[..., tuple], tensors: dict[str, Tensor], case: Case, **options: Any
) -> list[Tensor]:
    """o, the final state and the gradients of all inputs, for one fixed loss."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    lengths = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0).to(tensors["q"].device)
    options |= {"lookahead": True} if case.general else {}
    o, final_state = rule(**leaves, cu_seqlens=lengths, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(tensors["q"].dtype).to(x) for x in (o, final_state)]
    loss = (o * weights[0]).sum() + (final_state * weights[1]).sum()
    return [o, final_state, *torch.autograd.grad(loss, list(leaves.values()))]


def run_case(case: Case, device: torch.device) -> float:
    """The largest relative error over outputs, final states and all gradients."""
    tensors = make_inputs(case, device)
    with assume_heads(FULL_GPU if case.wide else None):
        found = outputs_and_gradients(
            mdn.ops.chunk_momentum_delta_rule, tensors, case, chunk_size=case.chunk_size, backend="triton"
        )
    exact = {name: x.double().cpu() for name, x in tensors.items()}
    return largest_error(found, outputs_and_gradients(mdn.ops.recurrent_momentum_delta_rule, exact, case))


def run_decode(dtype: torch.dtype, device: torch.device) -> float:
    """Two tokens through the decoding step, states in slots of a larger buffer."""
    case = Case("decode", dtype, 2, 2, 4, 128, 128)
    tensors = make_inputs(case, device)
    buffer = torch.randn(2, 3, 4, 128, 128, generator=torch.Generator().manual_seed(2)).to(device)
    exact: dict[str, Any] = {name: x.double().cpu() for name, x in tensors.items()}
    exact |= {"initial_state": buffer[:, 1:2].double().cpu()}
    o, final = mdn.ops.recurrent_momentum_delta_rule(**exact, output_final_state=True)
    slots = torch.tensor([1], device=device)
    found = []
    for t in range(2):
        token: dict[str, Any] = {name: x[:, t] for name, x in tensors.items() if name != "initial_state"}
        found.append(mdn.ops.momentum_delta_step(**token, state=buffer, state_indices=slots, backend="triton"))
    assert final is not None
    return largest_error([torch.stack(found, dim=1), buffer[:, 1:2]], [o, final])


def run_repeats(device: torch.device, case: Case = LARGE, repeats: int = BITWISE_REPEATS) -> float:
    """A grid that fills the GPU, again and again: any bit that differs is a race. 0, or infinity, or NaN."""
    tensors, rule = make_inputs(case, device), mdn.ops.chunk_momentum_delta_rule
    options = {"chunk_size": case.chunk_size, "backend": "triton"}
    first = outputs_and_gradients(rule, tensors, case, **options)
    if not all(x.isfinite().all() for x in first):
        return float("nan")
    for _ in range(repeats):
        again = outputs_and_gradients(rule, tensors, case, **options)
        if not all(torch.equal(a, b) for a, b in zip(first, again)):
            return float("inf")
    return 0.0


def run_generate(device: torch.device) -> float:
    """A tiny model writes the same tokens with the kernels as without. 0, or the number of others."""
    from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM

    torch.manual_seed(0)
    config = MomentumDeltaNetConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=32)
    model = MomentumDeltaNetForCausalLM(config).eval()
    torch.nn.Module.to(model, device)
    prompt = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(3)).to(device)
    written = {}
    for backend in ("triton", "torch"):
        os.environ["MDN_BACKEND"] = backend
        written[backend] = model.generate(prompt, max_new_tokens=8, do_sample=False)
    return float((written["triton"] != written["torch"]).sum())


def run_graph(device: torch.device) -> float:
    """A decoding step captured in a CUDA graph and replayed gives what the step itself gives."""
    case = Case("graph", torch.bfloat16, 1, 2, 2, 64, 64)
    tensors: dict[str, Any] = {
        name: x[:, 0] for name, x in make_inputs(case, device).items() if name != "initial_state"
    }
    start = torch.randn(2, 1, 2, 64, 64, generator=torch.Generator().manual_seed(4)).to(device)

    def step(buffer: Tensor) -> Tensor:
        return mdn.ops.momentum_delta_step(**tensors, state=buffer, backend="triton", check_gates=False)

    plain, captured = start.clone(), start.clone()
    expected = step(plain)
    step(captured)
    captured.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(captured)
    captured.copy_(start)
    graph.replay()
    return largest_error([o, captured], [expected.double().cpu(), plain.double().cpu()])


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """NaN if there is one, in any of the tensors."""
    errors = [
        (mine.double().cpu() - right).abs().max() / right.abs().max().clamp_min(1e-30)
        for mine, right in zip(found, expected, strict=True)
    ]
    return torch.stack(errors).max().item()  # Python's max would drop a NaN that is not the first


# ------------------------------------------------------------------------------------------------- what ran, and where


def describe(device: torch.device) -> list[str]:
    """The versions that matter when something fails."""
    from mdn.common.source import source_commit

    version = ".".join(map(str, triton_version() or ()))
    lines = [f"momentum-deltanet {mdn.__version__}, commit {source_commit() or 'unknown'}"]
    lines += [f"torch {torch.__version__}, Triton {version}, Python {platform.python_version()}"]
    if interpreting():
        return [*lines, "Triton's interpreter on the CPU"]
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:  # its Triton has the assembler inside
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return [*lines, f"{name}, {architecture}, HIP {torch.version.hip}, driver {amd_driver()}"]
    major, minor = torch.cuda.get_device_capability(device)
    driver = printed_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return [
        *lines,
        f"{name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}, driver {driver}",
        assembler(10 * major + minor),
    ]


def assembler(architecture: int) -> str:
    """Which ptxas Triton calls for this GPU, and the variable that replaces it. Triton itself is asked: which of its
    two it takes has changed between versions."""
    try:
        from triton import knobs
        from triton.backends.nvidia.compiler import get_ptxas

        tool = get_ptxas(architecture)
        variable = "TRITON_PTXAS_PATH" if tool == knobs.nvidia.ptxas else "TRITON_PTXAS_BLACKWELL_PATH"
    except Exception as error:  # a description must not stop the test
        return f"ptxas: {type(error).__name__}: {error}"
    return f"{tool.path}: {printed_line(tool.path, '--version', word='release')} ({variable} replaces it)"


def amd_driver() -> str:
    """Of the kernel's amdgpu module. One that came with the kernel has no version of its own."""
    try:
        return AMD_DRIVER.read_text().strip()
    except OSError:
        return f"unknown (Linux {platform.release()})"


def printed_line(*command: str, word: str = "") -> str:
    """The first line with this word that a program prints."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next((line.strip() for line in printed.splitlines() if word in line), "unknown")


# -------------------------------------------------------------------------------------------------- one by one, apart


class Check(NamedTuple):
    name: str
    allowed: float
    run: Callable[[], float]
    """the error"""


def all_checks(device: torch.device) -> list[Check]:
    checks = [Check(case.name, TOLERANCE[case.dtype], partial(run_case, case, device)) for case in CASES]
    checks += [Check(f"decode, {dtype}", TOLERANCE[dtype], partial(run_decode, dtype, device)) for dtype in TOLERANCE]
    checks.append(Check("generate with a tiny model", 0.0, partial(run_generate, device)))
    if not interpreting():
        checks.append(Check("decode in a CUDA graph", 1e-6, partial(run_graph, device)))
        checks.append(Check(f"large grid, {BITWISE_REPEATS} times bit for bit", 0.0, partial(run_repeats, device)))
    return checks


def run_here(check: Check) -> None:
    """In the process of the check: print its error and its seconds as a line of JSON."""
    faulthandler.enable()  # so that a segmentation fault says where it was
    if interpreting():
        from mdn.bench.gpu.interpreter import repair

        repair()
    began = time.monotonic()
    error = check.run()
    print(json.dumps({"error": error, "seconds": time.monotonic() - began}))


def run_apart(check: Check, say: Callable[[str], None]) -> bool:
    """A line of the table about a check in a process of its own. True if it passed."""
    say(f"{check.name}: {'running' if interpreting() else 'building its kernels and running'} ...")
    try:
        done = subprocess.run(
            [*COMMAND, "--only", check.name], capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        say(f"{check.name:<38}   NO ANSWER after {TIME_LIMIT} seconds")
        return False
    answer = next((line for line in done.stdout.splitlines() if line.startswith('{"error"')), None)
    if done.returncode != 0 or answer is None:
        code = done.returncode
        say(f"{check.name:<38}   CRASHED: {signal.strsignal(-code) if code < 0 else f'exit code {code}'}")
        for line in done.stderr.splitlines()[-20:]:
            say(f"    {line}")
        return False
    error, seconds = json.loads(answer).values()
    passed: bool = error <= check.allowed  # not true of NaN
    say(f"{check.name:<38}{error:>10.1e}{check.allowed:>10.0e}{seconds:>9.1f}{'' if passed else '   FAILED'}")
    return passed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m mdn.ops.triton.selftest")
    parser.add_argument("file", nargs="?", type=Path, default=Path("mdn-selftest.txt"), help="where the report goes")
    parser.add_argument("--only", metavar="NAME", help="run one check in this process and print its error as JSON")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_unavailable(device)
    if reason is not None:
        if device.type == "cpu" and triton_version() is not None:
            reason = f"torch {torch.__version__} finds no GPU here; TRITON_INTERPRET=1 runs the small cases on the CPU"
        print(f"no test was run: {reason}")
        return 2
    checks = all_checks(device)
    if options.only is None:
        return report(checks, describe(device), options.file)
    chosen = [check for check in checks if check.name == options.only]
    if not chosen:
        parser.error(f"--only must be one of: {'; '.join(check.name for check in checks)}")
    run_here(chosen[0])
    return 0


def report(checks: list[Check], description: list[str], path: Path) -> int:
    """Print and write a line for every check as soon as it is done."""
    with path.open("w") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        for line in description:
            say(line)
        if not interpreting():
            say(f"{len(checks)} checks; 10 to 20 minutes if Triton's cache does not have the kernels")
        say(f"{'case':<38}{'error':>10}{'allowed':>10}{'seconds':>9}")
        failed = sum(not run_apart(check, say) for check in checks)
        say(f"{len(checks) - failed} of {len(checks)} passed")
        if failed and not interpreting():
            say('use backend="torch" or MDN_BACKEND=torch until this is solved')
            if not torch.version.hip:
                say("on Hopper also try the ptxas of CUDA 13.3 or newer, by the variable that is named above")
        say(f"please send {path} back, whatever it says")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

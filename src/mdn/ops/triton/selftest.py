"""`python -m mdn.ops.triton.selftest [FILE]`: the kernels on the GPU that is here, through the public functions.

Every case is isolated: one that fails or crashes does not hide the others. Errors are the largest of any output or
gradient against the float64 recurrence, relative to the largest value. Exit code 0 if all pass, 1 if one does not, 2 if
there is nothing to test on. The same lines go to FILE (default mdn-selftest.txt): please send it back in any case.
With TRITON_INTERPRET=1 the small cases run, slowly, on the CPU.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mdn.ops
from mdn.ops.triton.availability import interpreting, triton_version, why_unavailable

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
BITWISE_REPEATS = 20


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


CASES = (
    Case("float32, K=V=64", torch.float32, 200, 2, 2, 64, 64),
    Case("bfloat16, K=V=64", torch.bfloat16, 200, 2, 2, 64, 64),
    Case("float16, K=V=64", torch.float16, 200, 2, 2, 64, 64),
    Case("bfloat16, K=128, V=256", torch.bfloat16, 300, 2, 2, 128, 256),
    Case("bfloat16, K=256, V=512", torch.bfloat16, 200, 1, 1, 256, 512),
    Case("bfloat16, grouped value heads", torch.bfloat16, 150, 2, 4, 128, 128),
    Case("float32, given p, chunk 32", torch.float32, 100, 1, 2, 64, 48, 32, True),
    Case("float32, chunk 16", torch.float32, 70, 1, 1, 32, 32, 16),
    Case("bfloat16, pack", torch.bfloat16, 160, 1, 2, 128, 64, 64, False, (0, 1, 90, 64, 0, 5)),
)
LARGE = Case("large", torch.bfloat16, 1024, 16, 16, 128, 256, batch=8)
GATES = ("log_alpha", "log_mu", "beta", "eta")


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
    return {name: x.to(device) for name, x in tensors.items()}


def outputs_and_gradients(
    rule: Callable[..., tuple], tensors: dict[str, Tensor], case: Case, **options: Any
) -> list[Tensor]:
    """o, the final state and the gradients of all inputs, for one fixed loss."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    lengths = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0).to(tensors["q"].device)
    o, final_state = rule(**leaves, cu_seqlens=lengths, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(tensors["q"].dtype).to(x) for x in (o, final_state)]
    loss = (o * weights[0]).sum() + (final_state * weights[1]).sum()
    return [o, final_state, *torch.autograd.grad(loss, list(leaves.values()))]


def run_case(case: Case, device: torch.device) -> float:
    """The largest relative error over outputs, final states and all gradients."""
    tensors = make_inputs(case, device)
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


def run_repeats(device: torch.device) -> float:
    """A grid that fills the GPU, again and again: any bit that differs is a race. 0, or infinity."""
    tensors = make_inputs(LARGE, device)
    rule = mdn.ops.chunk_momentum_delta_rule
    first = outputs_and_gradients(rule, tensors, LARGE, backend="triton")
    for _ in range(BITWISE_REPEATS):
        again = outputs_and_gradients(rule, tensors, LARGE, backend="triton")
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
        try:
            written[backend] = model.generate(prompt, max_new_tokens=8, do_sample=False)
        finally:
            del os.environ["MDN_BACKEND"]
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
    worst = 0.0
    for mine, right in zip(found, expected, strict=True):
        error = ((mine.double().cpu() - right).abs().max() / right.abs().max().clamp_min(1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def describe(device: torch.device) -> list[str]:
    """What ran where: the versions that matter when something fails."""
    version = triton_version()
    lines = [
        f"torch {torch.__version__}, Triton {'.'.join(map(str, version or ()))}, Python {platform.python_version()}"
    ]
    if interpreting():
        return [*lines, "Triton's interpreter on the CPU"]
    major, minor = torch.cuda.get_device_capability(device)
    lines.append(f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
    for command in (("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), (_ptxas(), "--version")):
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
            lines.append(f"{Path(command[0]).name}: {answer[-1] if answer else '?'}")
        except (OSError, subprocess.TimeoutExpired):
            lines.append(f"{command[0]}: not found")
    return lines


def _ptxas() -> str:
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return os.environ.get("TRITON_PTXAS_PATH", str(bundled))


def main(arguments: list[str]) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_unavailable(device)
    if reason is not None:
        if device.type == "cpu" and triton_version() is not None:
            reason = f"torch {torch.__version__} finds no GPU here; TRITON_INTERPRET=1 runs the small cases on the CPU"
        print(f"no test was run: {reason}")
        return 2
    checks: list[tuple[str, float, Callable[[], float]]] = [
        (case.name, TOLERANCE[case.dtype], partial(run_case, case, device)) for case in CASES
    ]
    checks += [(f"decode, {dtype}", TOLERANCE[dtype], partial(run_decode, dtype, device)) for dtype in TOLERANCE]
    checks.append(("generate with a tiny model", 0.0, partial(run_generate, device)))
    if interpreting():
        from mdn.bench.gpu.interpreter import repair

        repair()
    else:
        checks.append(("decode in a CUDA graph", 1e-6, partial(run_graph, device)))
        checks.append((f"large grid, {BITWISE_REPEATS} times bit for bit", 0.0, partial(run_repeats, device)))
    with Path(arguments[0] if arguments else "mdn-selftest.txt").open("w") as report:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=report, flush=True)

        for line in (*describe(device), f"{'case':<38}{'error':>10}{'allowed':>10}{'seconds':>9}"):
            say(line)
        failed = sum(not run_check(*check, say) for check in checks)
        say(f"{len(checks) - failed} of {len(checks)} passed")
        if failed and not interpreting():
            say('use backend="torch" or MDN_BACKEND=torch until this is solved; on Hopper also try a newer assembler:')
            say("TRITON_PTXAS_PATH=/path/to/ptxas of CUDA 13.3 or newer")
        say(f"please send {report.name} back, whatever it says")
    return 1 if failed else 0


def run_check(name: str, allowed: float, check: Callable[[], float], say: Callable[[str], None]) -> bool:
    """One line of the table; a crash is a failure of its own."""
    began = time.monotonic()
    try:
        error = check()
    except Exception as crash:
        say(f"{name:<38}   CRASHED: {type(crash).__name__}: {crash}")
        say(traceback.format_exc(limit=-3).rstrip())
        return False
    passed = error <= allowed
    verdict = "" if passed else "   FAILED"
    say(f"{name:<38}{error:>10.1e}{allowed:>10.0e}{time.monotonic() - began:>9.1f}{verdict}")
    return passed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

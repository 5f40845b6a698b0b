"""`python -m mdn.ops.triton.selftest`: every kernel against the float64 recurrence, on the GPU it finds.

Prints one row per case with the largest error of any output or gradient, relative to the largest value. Exit code 0 if
all pass, 1 if one does not, 2 if there is nothing to test on. With TRITON_INTERPRET=1 it runs, slowly, on the CPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdn.ops import recurrent_momentum_delta_rule
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState
from mdn.ops.triton import backward, forward, step_, why_unavailable
from mdn.ops.triton.availability import interpreting

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Case:
    """One row of the table; lengths make it a pack."""

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


CASES = (
    Case("float32, K=V=64", torch.float32, 200, 2, 2, 64, 64),
    Case("bfloat16, K=V=64", torch.bfloat16, 200, 2, 2, 64, 64),
    Case("float16, K=V=64", torch.float16, 200, 2, 2, 64, 64),
    Case("bfloat16, K=128, V=256", torch.bfloat16, 300, 2, 2, 128, 256),
    Case("bfloat16, K=V=256", torch.bfloat16, 200, 1, 1, 256, 256),
    Case("bfloat16, K=128, V=512", torch.bfloat16, 130, 1, 1, 128, 512),
    Case("bfloat16, grouped value heads", torch.bfloat16, 150, 2, 4, 128, 128),
    Case("float32, given p, chunk 32", torch.float32, 100, 1, 2, 64, 48, 32, True),
    Case("float32, chunk 16", torch.float32, 70, 1, 1, 32, 32, 16),
    Case("bfloat16, pack", torch.bfloat16, 160, 1, 2, 128, 64, 64, False, (0, 1, 90, 64, 0, 5)),
)


def make_inputs(case: Case, device: torch.device) -> RuleTensors:
    """q, k, v, p and hostile gates: hard zeros, ones and everything between."""
    generator = torch.Generator().manual_seed(0)

    def rows(heads: int, width: int) -> Tensor:
        return torch.randn(1, case.time, heads, width, generator=generator)

    def gate() -> Tensor:
        return torch.rand(1, case.time, case.value_heads, generator=generator)

    log_mu = torch.where(gate() < 0.1, torch.tensor(-float("inf")), -3.0 * gate() ** 2)
    log_alpha = torch.where(gate() < 0.05, torch.tensor(-12.0), -0.2 * gate())
    p = rows(case.heads, case.key_dim) if case.given_p else None
    tensors = [
        rows(case.heads, case.key_dim),
        rows(case.heads, case.key_dim),
        rows(case.value_heads, case.value_dim),
        p,
    ]
    narrow = [None if x is None else x.to(case.dtype).to(device) for x in tensors]
    gates = [x.to(device) for x in (log_alpha, log_mu, 0.5 * gate(), 1.5 * gate())]
    return RuleTensors(*narrow, *gates)  # type: ignore[arg-type]


def definition(named: dict[str, Any], boundaries: SequenceBoundaries | None = None) -> tuple[Tensor, Tensor]:
    """The float64 recurrence: (o, final_state)."""
    o, final_state = recurrent_momentum_delta_rule(**named, cu_seqlens=boundaries, output_final_state=True)
    assert final_state is not None
    return o, final_state


def exact(inputs: RuleTensors, case: Case, cotangents: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Outputs and gradients of the float64 recurrence, on the CPU: an independent path."""
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    named = {name: x.double().cpu().requires_grad_() for name, x in given.items()}
    boundaries = None if case.lengths is None else SequenceBoundaries.from_lengths(case.lengths)
    o, final_state = definition(named, boundaries)
    loss = (o * cotangents[0].double().cpu()).sum() + (final_state * cotangents[1].double().cpu()).sum()
    return [o, final_state, *torch.autograd.grad(loss, list(named.values()))]


def run_case(case: Case, device: torch.device) -> float:
    """The largest relative error over outputs, final states and all gradients."""
    sequences = 1 if case.lengths is None else len(case.lengths)
    generator = torch.Generator().manual_seed(1)
    shape = (2, sequences, case.value_heads, case.key_dim, case.value_dim)
    state, grad_state = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    value_shape = (1, case.time, case.value_heads, case.value_dim)
    grad_o = torch.randn(value_shape, generator=generator).to(case.dtype).to(device)
    boundaries = None if case.lengths is None else SequenceBoundaries.from_lengths(case.lengths, device)
    options = RuleOptions(scale=case.key_dim**-0.5, chunk_size=case.chunk_size)
    inputs = make_inputs(case, device)._replace(initial_state=state)
    o, final_state, residual = forward(inputs, boundaries, options, True)
    gradients = backward(grad_o, grad_state, inputs, residual, boundaries, options)
    found = [o, final_state, *(gradient for gradient in gradients if gradient is not None)]
    return largest_error(found, exact(inputs, case, (grad_o, grad_state)))


def run_decode(dtype: torch.dtype, device: torch.device) -> float:
    """Two tokens through the decoding kernel, states in slots of a larger buffer."""
    case = Case("decode", dtype, 2, 2, 4, 128, 128)
    inputs = make_inputs(case, device)
    state = torch.randn(2, 3, 4, 128, 128, generator=torch.Generator().manual_seed(2)).to(device)
    named = {name: x.double().cpu() for name, x in inputs._asdict().items() if x is not None}
    start = state[:, 1:2].double().cpu()
    o, final = definition(named | {"initial_state": start})
    slots = torch.tensor([1], device=device)
    options = RuleOptions(scale=128**-0.5)
    tokens = [RuleTensors(*(None if x is None else x[:, t] for x in inputs)) for t in range(2)]  # type: ignore[arg-type]
    found = [step_(token, StepState(state[0], state[1], slots), options) for token in tokens]
    return largest_error([torch.stack(found, dim=1), state[:, 1:2]], [o, final])


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    worst = 0.0
    for mine, right in zip(found, expected, strict=True):
        error = ((mine.double().cpu() - right).abs().max() / right.abs().max().clamp_min(1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_unavailable(device)
    if reason is not None:
        print(f"no test was run: {reason}")
        return 2
    where = "Triton's interpreter on the CPU" if interpreting() else torch.cuda.get_device_name(device)
    print(f"running on {where}\n{'case':<34}{'error':>10}{'allowed':>10}")
    if interpreting():
        from mdn.bench.gpu.interpreter import repair

        repair()
    checks = [(case.name, case.dtype, lambda case=case: run_case(case, device)) for case in CASES]
    checks += [(f"decode, {dtype}", dtype, lambda dtype=dtype: run_decode(dtype, device)) for dtype in TOLERANCE]
    failed = 0
    for name, dtype, check in checks:
        error = check()
        passed = error <= TOLERANCE[dtype]
        failed += not passed
        print(f"{name:<34}{error:>10.1e}{TOLERANCE[dtype]:>10.0e}{'' if passed else '   FAILED'}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

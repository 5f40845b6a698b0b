"""`mdn bench op --vector`: the momentum rule with vector decays beside KDA, both in their torch form.

One run gives the time of forward + backward, interleaved, and the peak memory of a long sequence. Both rules are first
checked against their recurrences in float64.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdn import ops
from mdn.bench.op_peers import RuleShape
from mdn.bench.timing import interleaved, machine
from mdn.common.results import Table

SHAPE = RuleShape(1, 2048, 4, 64, 64)
LONG = RuleShape(1, 8192, 4, 64, 64)
KDA, MOMENTUM, DIRECT = "KDA", "momentum, vector decays", "momentum, vector decays, direct write"
TIME_BAR, MEMORY_BAR = 1.6, 1.7

Rule = Callable[..., tuple[Tensor, Any]]


class Form(NamedTuple):
    chunk_form: Rule
    recurrence: Rule
    arguments: tuple[str, ...]


_MOMENTUM = Form(
    ops.chunk_vector_momentum_delta_rule,
    ops.recurrent_vector_momentum_delta_rule,
    ("q", "k", "v", "log_alpha", "log_mu", "beta", "eta"),
)
FORMS = {
    # KDA calls its log_alpha g.
    KDA: Form(partial(ops.chunk_kda, backend="torch"), ops.recurrent_kda, ("q", "k", "v", "g", "beta")),
    MOMENTUM: _MOMENTUM,
    DIRECT: _MOMENTUM._replace(arguments=(*_MOMENTUM.arguments, "direct")),
}


def run(quick: bool = False) -> dict[str, Any]:
    shape, long = (RuleShape(1, 128, 2, 16, 16), RuleShape(1, 256, 2, 16, 16)) if quick else (SHAPE, LONG)
    correctness = check_correct()
    calls: dict[str, Callable[[], object]] = {name: training_step(name, shape) for name in FORMS}
    seconds = interleaved(calls, repeats=2 if quick else 25, budget_seconds=30, label=str(shape))
    return {
        "machine": machine(),
        "quick": quick,
        "correctness": correctness,
        "shape": str(shape),
        "long_shape": str(long),
        "seconds": seconds,
        "peak_bytes": {name: peak_bytes(name, long) for name in FORMS},
    }


def make_inputs(form: Form, shape: RuleShape, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What the form takes: q, k and the vector gate ``[B, T, H, K]``, v ``[B, T, H, V]``, other gates ``[B, T, H]``."""
    generator = torch.Generator().manual_seed(0)
    rows = (shape.batch, shape.time, shape.heads)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=dtype)

    inputs = {name: torch.randn(*rows, shape.key_dim, generator=generator, dtype=dtype) for name in ("q", "k")}
    inputs["v"] = torch.randn(*rows, shape.value_dim, generator=generator, dtype=dtype)
    inputs |= {"log_alpha": -0.5 * uniform(*rows, shape.key_dim), "log_mu": -0.5 * uniform(*rows)}
    inputs |= {"beta": 0.5 * uniform(*rows), "eta": 2 * uniform(*rows), "direct": 0.5 * uniform(*rows)}
    inputs["g"] = inputs["log_alpha"]
    return {name: inputs[name].requires_grad_() for name in form.arguments}


def training_step(name: str, shape: RuleShape) -> Callable[[], tuple[Tensor, ...]]:
    """One forward + backward; returns the gradients."""
    form = FORMS[name]
    inputs = make_inputs(form, shape)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(form.chunk_form(**inputs)[0].sum(), list(inputs.values()))

    return step


def check_correct() -> dict[str, float]:
    """The largest relative difference between each chunk form and its recurrence in float64."""
    errors = {}
    for name, form in FORMS.items():
        inputs = make_inputs(form, RuleShape(1, 100, 2, 16, 16), torch.float64)
        found, expected = form.chunk_form(**inputs)[0], form.recurrence(**inputs)[0]
        errors[name] = float(((found - expected).norm() / expected.norm()).detach())
        if not errors[name] < 1e-12:
            raise RuntimeError(f"{name} is off by {errors[name]:.1e} from its recurrence")
    return errors


def peak_bytes(name: str, shape: RuleShape) -> int | None:
    """How much one training step adds to the resident memory of a fresh process at its peak; None outside Linux."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown_by_a_step, (name, shape))


def _grown_by_a_step(name: str, shape: RuleShape) -> int | None:
    training_step(name, RuleShape(1, 64, 1, 16, 16))()  # what a first call allocates for good
    step = training_step(name, shape)
    before = _peak_resident_bytes()
    step()
    after = _peak_resident_bytes()
    return None if before is None or after is None else after - before


def _peak_resident_bytes() -> int | None:
    """Of this process since it began. getrusage would count its parent too."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def table(content: dict[str, Any]) -> Table:
    seconds, peak = content["seconds"], content["peak_bytes"]
    rows = [
        [
            name,
            f"{1e3 * seconds[name]:.1f}",
            f"{seconds[name] / seconds[KDA]:.2f}",
            f"{peak[name] / 2**20:.0f}" if peak[KDA] else "–",
            f"{peak[name] / peak[KDA]:.2f}" if peak[KDA] else "–",
        ]
        for name in seconds
    ]
    header = [
        "torch form",
        f"ms, {content['shape']}",
        f"over {KDA}",
        f"peak MiB, {content['long_shape']}",
        f"over {KDA}",
    ]
    bars = f"bars for the momentum rule: {TIME_BAR} times the time and {MEMORY_BAR} times the memory of {KDA}"
    return Table(f"forward + backward, float32 ({bars})", header, rows)

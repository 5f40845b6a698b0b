"""`mdn bench op --general`: what the options of the general rule cost.

The direct write and the look-ahead are timed beside the plain momentum rule, in both CPU backends. The rule with vector
decays is timed beside KDA's torch form, and the peak memory of the two is measured on a long sequence. Forward +
backward in float32, interleaved; every form is first checked against its recurrence in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdn import ops
from mdn.bench.op_peers import RuleShape
from mdn.bench.timing import interleaved, machine
from mdn.common.results import Table
from mdn.common.spawning import spawned_pool
from mdn.ops.backends import why_not

SHAPE = RuleShape(1, 2048, 4, 64, 64)
LONG = RuleShape(1, 8192, 4, 64, 64)
_SMALL, _TINY = RuleShape(1, 128, 2, 16, 16), RuleShape(1, 64, 1, 16, 16)
DIRECT_TIME, VECTOR_TIME, VECTOR_MEMORY = 1.03, 1.6, 1.7
"""bars: a direct write over the plain rule, vector decays over KDA"""
Rule = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True)
class Form:
    name: str
    beside: str
    """the form whose time is the unit"""
    chunk_form: Rule
    recurrence: Rule
    gates: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    backend: str = "torch"

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.chunk_form(**inputs, **self.options, backend=self.backend)[0]


def _momentum_forms(backend: str) -> list[Form]:
    plain, rule = f"momentum, {backend}", (ops.chunk_momentum_delta_rule, ops.recurrent_momentum_delta_rule)
    gates = ("log_alpha", "log_mu", "beta", "eta")
    return [
        Form(plain, plain, *rule, gates, backend=backend),
        Form(f"{plain}, direct write", plain, *rule, (*gates, "direct"), backend=backend),
        Form(f"{plain}, look-ahead", plain, *rule, gates, {"lookahead": True}, backend=backend),
    ]


def _vector_forms() -> list[Form]:
    rule = ops.chunk_vector_momentum_delta_rule, ops.recurrent_vector_momentum_delta_rule
    gates = ("vector_log_alpha", "log_mu", "beta", "eta")
    return [
        Form("KDA", "KDA", ops.chunk_kda, ops.recurrent_kda, ("g", "beta")),
        Form("momentum, vector decays", "KDA", *rule, gates),
        Form("momentum, vector decays, direct write", "KDA", *rule, (*gates, "direct")),
    ]


def forms() -> dict[str, Form]:
    """All that can run on this machine, by name."""
    native = [] if why_not("cpu", torch.zeros(1)) else _momentum_forms("cpu")
    return {form.name: form for form in (*_momentum_forms("torch"), *native, *_vector_forms())}


def run(quick: bool = False, threads: int | None = None) -> dict[str, Any]:
    if threads is not None:
        torch.set_num_threads(threads)
    shape, long = (_SMALL, _SMALL) if quick else (SHAPE, LONG)
    correctness = {name: check_correct(form) for name, form in forms().items()}
    calls: dict[str, Callable[[], object]] = {name: training_step(form, shape) for name, form in forms().items()}
    seconds = interleaved(calls, repeats=2 if quick else 60, budget_seconds=60, label=str(shape))
    content: dict[str, Any] = {
        "machine": machine(),
        "quick": quick,
        "correctness": correctness,
        "shape": str(shape),
        "long_shape": str(long),
        "seconds": seconds,
        "peak_bytes": {form.name: peak_bytes(form.name, long) for form in _vector_forms()},
    }
    return content | {"bars": [] if quick else bars(content)}


def make_inputs(form: Form, shape: RuleShape, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What the form takes: q, k and vector gates ``[B, T, H, K]``, v ``[B, T, H, V]``, other gates ``[B, T, H]``."""
    generator = torch.Generator().manual_seed(0)
    rows = (shape.batch, shape.time, shape.heads)
    sizes = {"q": (shape.key_dim,), "k": (shape.key_dim,), "v": (shape.value_dim,)}
    inputs = {name: torch.randn(*rows, *size, generator=generator, dtype=dtype) for name, size in sizes.items()}
    vector = {"g", "vector_log_alpha"}
    scales = {
        "g": -0.5,
        "vector_log_alpha": -0.5,
        "log_alpha": -0.5,
        "log_mu": -0.5,
        "beta": 0.5,
        "eta": 2.0,
        "direct": 0.5,
    }
    for name in form.gates:
        size = (shape.key_dim,) if name in vector else ()
        gate = scales[name] * torch.rand(*rows, *size, generator=generator, dtype=dtype)
        inputs[name.removeprefix("vector_")] = gate
    return {name: x.requires_grad_() for name, x in inputs.items()}


def training_step(form: Form, shape: RuleShape) -> Callable[[], tuple[Tensor, ...]]:
    """One forward + backward; returns the gradients."""
    inputs = make_inputs(form, shape)
    return lambda: torch.autograd.grad(form(inputs).sum(), list(inputs.values()))


def check_correct(form: Form) -> float:
    """The relative error of the form in float32; RuntimeError if it does not compute its recurrence."""
    shape = RuleShape(1, 100, 2, 16, 16)
    expected = form.recurrence(**make_inputs(form, shape, torch.float64), **form.options)[0]
    single = {name: x.detach().float() for name, x in make_inputs(form, shape, torch.float64).items()}
    error = float(((form(single) - expected).norm() / expected.norm()).detach())
    if not error < 2e-6:
        raise RuntimeError(f"{form.name} is off by {error:.1e} from its recurrence; nothing is reported")
    return error


def peak_bytes(name: str, shape: RuleShape) -> int | None:
    """How much one training step adds to the resident memory of a fresh process at its peak; None outside Linux."""
    with spawned_pool(1) as pool:
        return pool.submit(_grown_by_a_step, name, shape).result()


def _grown_by_a_step(name: str, shape: RuleShape) -> int | None:
    training_step(forms()[name], _TINY)()  # what a first call allocates for good
    step = training_step(forms()[name], shape)
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


# -------------------------------------------------------------------------------------------------------------- results


def bars(content: dict[str, Any]) -> list[dict[str, Any]]:
    """What is promised, what was measured, and whether it held in this run."""
    seconds, peak = content["seconds"], content["peak_bytes"]
    direct, vector = "momentum, {}, direct write", "momentum, vector decays"
    rows = []
    for backend in ("torch", "cpu"):
        if f"momentum, {backend}" in seconds:
            ratio = seconds[direct.format(backend)] / seconds[f"momentum, {backend}"]
            rows.append((f"{direct.format(backend)}: time over the plain rule", ratio, DIRECT_TIME))
    rows.append((f"{vector}: time over KDA, {content['shape']}", seconds[vector] / seconds["KDA"], VECTOR_TIME))
    if peak["KDA"]:
        memory = peak[vector] / peak["KDA"]
        rows.append((f"{vector}: peak memory over KDA, {content['long_shape']}", memory, VECTOR_MEMORY))
    return [{"what": what, "measured": x, "bar": f"<= {bar:g}", "met": x <= bar} for what, x, bar in rows]


def table(content: dict[str, Any]) -> Table:
    seconds, peak = content["seconds"], content["peak_bytes"]
    beside = {form.name: form.beside for form in (*_momentum_forms("torch"), *_momentum_forms("cpu"), *_vector_forms())}
    rows = []
    for name in seconds:
        row = [name, f"{1e3 * seconds[name]:.1f}", f"{seconds[name] / seconds[beside[name]]:.2f}"]
        measured = peak.get(name) is not None and peak[beside[name]]
        memory = [f"{peak[name] / 2**20:.0f}", f"{peak[name] / peak[beside[name]]:.2f}"] if measured else ["–", "–"]
        rows.append([*row, *memory, beside[name]])
    header = ["form", f"ms, {content['shape']}", "over its peer", f"peak MiB, {content['long_shape']}", "over its peer"]
    return Table("forward + backward, float32", [*header, "peer"], rows)

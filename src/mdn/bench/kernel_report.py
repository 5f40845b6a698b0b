"""The report of `mdn bench kernels`: what the Triton kernels, ours and FLA's, need on absent GPUs.

Its rows: ``kernels`` and ``variants`` (a compiled launch each), ``estimates`` (a launch of forward + backward, with its
estimated time), ``executed`` (a pass and kernel, counted by the emulator; ``executed_large``: ours at K=256, V=512),
``calibration`` (published times beside estimates) and, on request, ``lines`` (source lines). Rows of launches have the
tile: V columns of a program, warps, stages. ``estimate_ms`` and ``counts`` are sums over rows, per op, and
``provenance`` says what made the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mdn.bench.kernels import VARIANTS, Variant, count_launches_and_bytes
from mdn.common.progress import progress
from mdn.common.results import provenance
from mdn.common.source import source_commit

Rows = list[dict[str, Any]]
VALUE_DIM = 256
OPS = ("mdn", "gdn", "kda")
PACKAGES = ("triton", "fla-core")
ASSEMBLED_FOR = {"ptxas": 90, "ptxas-blackwell": 100}
"""Triton's assemblers, and a GPU for which each is called"""
COUNTED = ("warp_instructions", "mma", "barriers", "sectors", "sectors_distinct", "wavefronts", "wavefronts_ideal")


@dataclass(frozen=True)
class ReportOptions:
    """What to look at."""

    targets: Sequence[str]
    """GPUs that the kernels are compiled for, with inputs of the paper's models"""
    key_dims: Sequence[int]
    variants: Sequence[str] = ()
    """GPUs for which every other kind of input is compiled, too"""
    estimates: Sequence[str] = ()
    """GPUs for which times are estimated; if there is one, executed instructions are counted, too; needs FLA"""
    lines: int = 0
    """source lines of every kernel to list, those that execute most"""


class Step(NamedTuple):
    """One part of a report: which rows it makes, and how."""

    into: str
    what: str
    make: Callable[[], Iterable[dict[str, Any]]]


def make_report(options: ReportOptions) -> dict[str, Any]:
    """Compile, estimate and emulate; minutes to half an hour."""
    from mdn.bench.gpu.compiling import compile_variant  # imports Triton
    from mdn.bench.gpu.counts import LARGE, count_executed, dearest_lines
    from mdn.bench.gpu.estimate import calibrate, estimate_times
    from mdn.ops.triton.availability import triton_version

    if options.estimates and importlib.util.find_spec("fla") is None:
        raise ValueError(
            "estimates compare with FLA's kernels, which are not installed (pip install 'momentum-deltanet[fla]'); "
            "--quick leaves them out"
        )
    steps = [
        Step("traffic", f"count launches, K={key_dim}", partial(_traffic, key_dim)) for key_dim in options.key_dims
    ]
    for key_dim in options.key_dims:
        variant = Variant(key_dim=key_dim, value_dim=VALUE_DIM)
        for target in options.targets:
            steps.append(Step("kernels", f"compile, {target}", partial(compile_variant, variant, target)))
    for target in options.variants:
        for variant in VARIANTS:
            steps.append(Step("variants", f"compile, {target}", partial(_compile_named, variant, target)))
    for target in options.estimates:
        for op in OPS:
            steps.append(Step("estimates", f"estimate {op}, {target}", partial(estimate_times, op, target)))
    if options.estimates:
        steps.append(Step("calibration", "calibrate", calibrate))
        for op, target in (("mdn", "sm_80"), ("mdn", "sm_90"), ("gdn", "sm_80"), ("kda", "sm_80")):
            steps.append(Step("executed", f"emulate {op}, {target}", partial(count_executed, op, target)))
        for target in ("sm_80", "sm_90"):
            large = partial(count_executed, "mdn", target, LARGE)
            steps.append(Step("executed_large", f"emulate mdn, {LARGE}, {target}", large))
    if options.lines:
        for op in OPS if options.estimates else OPS[:1]:
            lines = partial(dearest_lines, op, "sm_80", options.lines)
            steps.append(Step("lines", f"emulate {op} by line", lines))
    rows: dict[str, Rows] = {}
    bar = progress(steps, unit="step")
    for into, what, make in bar:
        bar.set_description(what)
        rows.setdefault(into, []).extend(make())
    traffic = {f"K{found['key_dim']}": found for found in rows.pop("traffic")}
    version = triton_version()
    assert version is not None
    report = {
        "triton": ".".join(map(str, version)),
        "provenance": origin(),
        "launches": next(iter(traffic.values()))["launches"],
        "bytes_written_per_token_head": {width: found["bytes"] for width, found in traffic.items()},
        "bytes_written_by_kernel": {width: found["by_kernel"] for width, found in traffic.items()},
    }
    return with_totals(report | rows)


def _traffic(key_dim: int) -> Rows:
    return [{"key_dim": key_dim} | count_launches_and_bytes(key_dim, VALUE_DIM)]


def _compile_named(variant: Variant, target: str) -> Rows:
    from mdn.bench.gpu.compiling import compile_variant

    return [{"variant": variant.name} | row for row in compile_variant(variant, target)]


# ---------------------------------------------------------------------------------------------------------------- sums


def total_ms(estimates: Rows) -> dict[tuple[str, str], dict[str, float]]:
    """(target, size) -> op -> estimated milliseconds of all its launches."""
    totals: dict[tuple[str, str], dict[str, float]] = {}
    for row in estimates:
        ops = totals.setdefault((row["target"], row["size"]), {})
        ops[row["op"]] = ops.get(row["op"], 0.0) + row["ms"]
    return totals


def total_counts(executed: Rows) -> dict[tuple[str, str, str], dict[str, float]]:
    """(target, op, pass) -> what all kernels of the pass execute per token and head."""
    totals: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in executed:
        sums = totals.setdefault((row["target"], row["op"], row["pass"]), dict.fromkeys(COUNTED, 0.0))
        for figure in COUNTED:
            sums[figure] += row[figure]
    return totals


def with_totals(report: dict[str, Any]) -> dict[str, Any]:
    """The report with ``estimate_ms`` (sm_90; size -> op -> milliseconds) and ``counts`` (sm_80; op -> pass -> figure
    -> number per token and head), the two summaries by which ops are compared."""
    found = dict(report)
    if "estimates" in report:
        times = total_ms(report["estimates"])
        found["estimate_ms"] = {
            size.replace("=", "").replace(" ", "_"): ops for (target, size), ops in times.items() if target == "sm_90"
        }
    if "executed" in report:
        found["counts"] = {op: {} for op in OPS}
        for (target, op, which), sums in total_counts(report["executed"]).items():
            if target == "sm_80":
                found["counts"][op][which] = sums
    return found


def origin() -> dict[str, Any]:
    """The command, the date, the commit and all versions: the ``provenance`` of a report."""
    found = provenance(seed=None)
    return found | {"commit": source_commit(), "versions": found["versions"] | compiler_versions()}


def compiler_versions() -> dict[str, str]:
    """Of Triton, its assemblers and FLA's kernels."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {name: get_ptxas(architecture).version for name, architecture in ASSEMBLED_FOR.items()}

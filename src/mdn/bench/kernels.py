"""What the Triton kernels cost, found without a GPU: resources per target, launches, and bytes written.

Resources come from compiling exactly the launches that `forward`, `backward` and `step_` make. Launches and bytes are
counted while the kernels run under Triton's interpreter, in a process of its own (`python -m mdn.bench.kernels K V`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState

BARS = {"launches": {"forward": 5, "backward": 6}, "bytes_K128": {"forward": 3000, "backward": 8000}}
SPILL_BAR_K128 = 64
ESTIMATE_BARS = {"H=6 K=128 V=256": {"gdn": 1.5, "kda": 1.1}, "H=6 K=256 V=512": {"gdn": 1.4, "kda": 1.3}}
"""how many times as long ours may take by the estimate on sm_90"""
COUNT_BARS = {"forward": 700, "backward": 2000}
"""warp instructions per token and head, emulated"""
WAVEFRONT_BAR = 1.2
"""passes through shared memory over those without bank conflicts, in every kernel"""
SHARED_LIMIT_SM90 = 232_448
PASSES = ("forward", "backward", "decode")


@dataclass(frozen=True)
class Variant:
    """Inputs of one kind; the defaults are those of the paper's models (6 heads: strides are constants of the code)."""

    name: str = "default"
    key_dim: int = 128
    value_dim: int = 256
    batch: int = 8
    time: int = 128
    heads: int = 6
    value_heads: int = 6
    dtype: torch.dtype = torch.bfloat16
    chunk_size: int = 64
    given_p: bool = False
    packed: bool = False
    """a pack of two sequences, with initial states and their gradients; decoding into slots"""

    def inputs(self, initial_state: Tensor | None = None) -> RuleTensors:
        """All zero."""
        batch = 1 if self.packed else self.batch

        def rows(heads: int, width: int) -> Tensor:
            return torch.zeros(batch, self.time, heads, width, dtype=self.dtype)

        p = rows(self.heads, self.key_dim) if self.given_p else None
        q, k = (rows(self.heads, self.key_dim) for _ in "qk")
        gates = {
            name: torch.zeros(batch, self.time, self.value_heads) for name in ("log_alpha", "log_mu", "beta", "eta")
        }
        v = rows(self.value_heads, self.value_dim)
        return RuleTensors(q, k, v, p, **gates, initial_state=initial_state)

    def run(self, which: str) -> None:
        """Call forward, backward or the decoding step as the dispatcher would."""
        from mdn.ops.triton import backward, forward, step_

        options = RuleOptions(scale=self.key_dim**-0.5, chunk_size=self.chunk_size)
        boundaries = SequenceBoundaries.from_lengths([1, self.time - 1]) if self.packed else None
        state = torch.zeros(2, 2 if self.packed else self.batch, self.value_heads, self.key_dim, self.value_dim)
        given_state = state if self.packed else None
        inputs = self.inputs(given_state)
        if which == "forward":
            forward(inputs, boundaries, options, True)
        elif which == "backward":
            backward(torch.zeros_like(inputs.v), given_state, inputs, torch.zeros_like(inputs.v), boundaries, options)
        else:
            token = RuleTensors(*(None if x is None else x[:, 0] for x in self.inputs()))  # type: ignore[arg-type]
            step_(token, StepState(state[0], state[1], torch.tensor([1]) if self.packed else None), options)


VARIANTS = (
    Variant("batch 1", batch=1),
    Variant("given p", given_p=True),
    Variant("two value heads per key head", heads=3),
    Variant("pack with states and slots", packed=True),
    Variant("float16", dtype=torch.float16),
    Variant("float32", dtype=torch.float32),
    Variant("chunk 16", chunk_size=16),
    Variant("chunk 32", chunk_size=32),
    Variant("K=64, V=64", key_dim=64, value_dim=64),
    Variant("K=256, V=512, given p", key_dim=256, value_dim=512, given_p=True),
    Variant("K=256, V=512, float32", key_dim=256, value_dim=512, dtype=torch.float32),
)


def record_launches(variant: Variant, target: str) -> dict[str, list[Any]]:
    """The launches of each pass, made as for ``target`` but not run."""
    from mdn.ops.triton.host import intercept_launches
    from mdn.ops.triton.tiles import assume_target

    seen: dict[str, list[Any]] = {which: [] for which in PASSES}
    with assume_target(target):
        for which in PASSES:
            with intercept_launches(seen[which].append):
                variant.run(which)
    return seen


def compile_variant(variant: Variant, target: str) -> Iterator[dict[str, Any]]:
    """One row per launch: name, pass, target, K, V, its resources and, on sm_80 and sm_90, its static timeline."""
    from mdn.bench.gpu.compiling import build, compile_launch
    from mdn.bench.gpu.estimate import GPUS, analyse
    from mdn.ops.triton.availability import interpreting

    if interpreting():
        raise ValueError("TRITON_INTERPRET must not be 1 here: the interpreter compiles nothing")
    for which, launches in record_launches(variant, target).items():
        for launch in launches:
            row = {"name": launch.name, "pass": which, "target": target, "K": variant.key_dim, "V": variant.value_dim}
            row |= compile_launch(launch, target).as_dict()
            if target in GPUS:
                found = analyse(build(launch, target))
                row |= found.as_dict(GPUS[target], scan=launch.name in SCANS)
            yield row


SCANS = ("forward_states", "rebuild_states", "backward_states")
"""kernels that walk along a sequence: their cycles and barriers are those of one chunk"""


def total_ms(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """(target, size) -> op -> estimated milliseconds of all its launches."""
    totals: dict[tuple[str, str], dict[str, float]] = {}
    for row in report.get("estimates", ()):
        ops = totals.setdefault((row["target"], row["size"]), {})
        ops[row["op"]] = ops.get(row["op"], 0.0) + row["ms"]
    return totals


def written_by(variant: Variant, which: str) -> list[tuple[str, dict[str, int]]]:
    """For each launch of a pass: the kernel and the bytes it writes into each argument, counted while it runs."""
    from mdn.bench.gpu.interpreter import count_written_bytes
    from mdn.ops.triton.host import Launch, intercept_launches, run_launch

    found: list[tuple[str, dict[str, int]]] = []

    def count(launch: Launch) -> None:
        with count_written_bytes() as written:
            run_launch(launch)
        tensors = {name: x for name, x in launch.arguments.items() if isinstance(x, Tensor)}
        pieces = {name: written.within(x.data_ptr(), x.numel() * x.element_size()) for name, x in tensors.items()}
        if sum(pieces.values()) != written.total:
            raise ValueError(f"{launch.name} wrote outside its arguments, or they overlap")
        found.append((launch.name, {name: size for name, size in pieces.items() if size}))

    with intercept_launches(count):
        variant.run(which)
    return found


def count_in_this_process(key_dim: int, value_dim: int) -> dict[str, dict[str, Any]]:
    """Of each pass: its launches, and the bytes written per token and head, in all and by kernel and buffer.

    Two lengths are run and the difference taken, so that what is written once per sequence (the final state) does not
    depend on the length chosen here. Decoding is one token.
    """
    from mdn.bench.gpu.interpreter import repair

    repair()
    short = Variant(key_dim=key_dim, value_dim=value_dim, batch=1, heads=1, value_heads=1, time=64)
    long = replace(short, time=192)
    by_kernel: dict[str, dict[str, dict[str, float]]] = {which: {} for which in PASSES}
    launches = dict.fromkeys(PASSES, 0)
    for which in PASSES:
        few, many = written_by(short, which), written_by(long, which)
        launches[which] = len(many)
        for (kernel, once), (_, buffers) in zip(few, many, strict=True):
            tokens = long.time - short.time
            per_token = {name: (size - once[name]) / tokens for name, size in buffers.items()}
            by_kernel[which][kernel] = {**once} if which == "decode" else per_token
    totals = {which: sum(sum(buffers.values()) for buffers in kernels.values()) for which, kernels in by_kernel.items()}
    return {"launches": launches, "bytes": totals, "by_kernel": by_kernel}


def count_launches_and_bytes(key_dim: int, value_dim: int) -> dict[str, dict[str, Any]]:
    """`count_in_this_process` in a process that has the interpreter switched on."""
    command = [sys.executable, "-W", "ignore", "-m", "mdn.bench.kernels", str(key_dim), str(value_dim)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"counting launches failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def broken_bars(report: dict[str, Any]) -> list[str]:
    """Every bar of this project that the report does not meet, in words."""
    broken = []
    for name, bar in BARS["launches"].items():
        if report["launches"][name] > bar:
            broken.append(f"{name}: {report['launches'][name]} launches, bar {bar}")
    for name, bar in BARS["bytes_K128"].items():
        found = report["bytes_written_per_token_head"].get("K128", {}).get(name, 0)
        if found > bar:
            broken.append(f"{name}: {found:.0f} bytes per token and head at K=128, bar {bar}")
    alone = [row for row in report.get("variants", ()) if row["variant"] == "batch 1"]
    for row in (*report["kernels"], *alone):
        if row["K"] == 128 and row["target"] in ("sm_80", "sm_90") and row["spill_bytes"] > SPILL_BAR_K128:
            broken.append(f"{row['name']} spills {row['spill_bytes']} bytes on {row['target']} at K=128")
        if row["name"] == "decode" and row.get("loads_after_a_wait"):
            broken.append(f"decode issues {row['loads_after_a_wait']} loads after a wait on {row['target']}")
    for (target, size), times in total_ms(report).items():
        for other, factor in ESTIMATE_BARS[size].items():
            if target == "sm_90" and times["mdn"] > factor * times[other]:
                broken.append(f"{size}: estimated {times['mdn'] / times[other]:.2f} times {other}, bar {factor}")
    ours = [row for row in report.get("counts", ()) if row["op"] == "mdn"]
    for which, bar in COUNT_BARS.items():
        for target in {row["target"] for row in ours}:
            mine = [row["warp_instructions"] for row in ours if (row["target"], row["pass"]) == (target, which)]
            if sum(mine) > bar:
                broken.append(f"{which}: {sum(mine):.0f} warp instructions on {target}, bar {bar}")
    for row in ours:
        if row["wavefronts"] > WAVEFRONT_BAR * row["wavefronts_ideal"]:
            broken.append(
                f"{row['name']} ({row['pass']}, {row['target']}): {row['wavefronts'] / row['wavefronts_ideal']:.2f} "
                f"times the wavefronts without bank conflicts, bar {WAVEFRONT_BAR}"
            )
    for row in (*report["kernels"], *report.get("variants", ())):
        if row.get("register_products"):
            broken.append(f"{row['name']} has wgmma with an operand in registers on {row['target']} at K={row['K']}")
        if row["target"] == "sm_90" and row["shared_bytes"] > SHARED_LIMIT_SM90:
            broken.append(f"{row['name']} needs {row['shared_bytes']} bytes of shared memory on sm_90 at K={row['K']}")
    return broken


if __name__ == "__main__":
    print(json.dumps(count_in_this_process(int(sys.argv[1]), int(sys.argv[2]))))

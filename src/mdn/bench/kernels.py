"""The launches that `forward`, `backward` and `step_` make for inputs of each kind, recorded or run without a GPU.

Launches and the bytes they write are counted while the kernels run under Triton's interpreter, in a process of its own
(`python -m mdn.bench.kernels K V`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState

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
    general: bool = False
    """a direct write and the look-ahead error of the general rule"""

    def inputs(self, initial_state: Tensor | None = None) -> RuleTensors:
        """Zeros of these shapes."""
        batch = 1 if self.packed else self.batch

        def rows(heads: int, width: int) -> Tensor:
            return torch.zeros(batch, self.time, heads, width, dtype=self.dtype)

        p = rows(self.heads, self.key_dim) if self.given_p else None
        q, k = (rows(self.heads, self.key_dim) for _ in "qk")
        gates = {
            name: torch.zeros(batch, self.time, self.value_heads) for name in ("log_alpha", "log_mu", "beta", "eta")
        }
        v = rows(self.value_heads, self.value_dim)
        direct = torch.zeros_like(gates["beta"]) if self.general else None
        return RuleTensors(q, k, v, p, **gates, direct=direct, initial_state=initial_state)

    def run(self, which: str) -> None:
        """Call forward, backward or the decoding step as the dispatcher would."""
        from mdn.ops.triton import backward, forward, step_

        options = RuleOptions(scale=self.key_dim**-0.5, chunk_size=self.chunk_size, lookahead=self.general)
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
    Variant("batch 1, given p", batch=1, given_p=True),
    Variant("batch 1, K=256, V=512", batch=1, key_dim=256, value_dim=512),
    Variant("batch 1, K=256, V=512, given p, direct", 256, 512, batch=1, given_p=True, general=True),
    Variant("given p", given_p=True),
    Variant("two value heads per key head", heads=3),
    Variant("pack with states and slots", packed=True),
    Variant("direct write and look-ahead", general=True),
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


if __name__ == "__main__":
    print(json.dumps(count_in_this_process(int(sys.argv[1]), int(sys.argv[2]))))

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
from typing import Any

import torch

from mdn.ops.momentum_delta_rule.options import RuleOptions

CHUNK = 64
HEADS_400M = 6  # of the paper's 400M model (K=128, V=256): strides are constants of the compiled code
BARS = {"launches": {"forward": 5, "backward": 6}, "bytes_K128": {"forward": 3000, "backward": 8000}}
SHARED_LIMIT_SM90 = 232_448


def example_inputs(time: int, key_dim: int, value_dim: int, heads: int = 1) -> tuple[list[Any], RuleOptions]:
    """bfloat16 inputs: (q, k, v, p, log_alpha, log_mu, beta, eta), p not given, L2 norm inside."""
    rows = [torch.zeros(1, time, heads, width, dtype=torch.bfloat16) for width in (key_dim, key_dim, value_dim)]
    gates = [torch.zeros(1, time, heads) for _ in range(4)]
    return [*rows, None, *gates], RuleOptions(scale=key_dim**-0.5, chunk_size=CHUNK)


def record_launches(key_dim: int, value_dim: int, target: str) -> list[Any]:
    """The launches of one forward, backward and decoding step, made as for ``target`` but not run."""
    from mdn.ops.triton import backward, forward, step_
    from mdn.ops.triton.launcher import watch_launches
    from mdn.ops.triton.tiles import assume_target

    inputs, options = example_inputs(2 * CHUNK, key_dim, value_dim, HEADS_400M)
    with assume_target(target), watch_launches(run=False) as seen:
        o, state, residual = forward(*inputs, None, None, options, True)
        backward(o, None, *inputs, None, residual, None, options)
        token = [None if x is None else x[:, 0] for x in inputs]
        step_(*token, state[0], state[1], None, options)
    by_name = {launch.kernel.__name__: launch for launch in seen}
    return list(by_name.values())


def compile_all(targets: list[str], key_dims: list[int], value_dim: int) -> Iterator[dict[str, Any]]:
    """One row per kernel, target and K: the rows of `kernels` in the JSON."""
    from mdn.ops.triton.availability import interpreting
    from mdn.ops.triton.resources import compile_launch

    if interpreting():
        raise ValueError("TRITON_INTERPRET must not be 1 here: the interpreter compiles nothing")
    for key_dim in key_dims:
        for target in targets:
            for launch in record_launches(key_dim, value_dim, target):
                name = launch.kernel.__name__.removesuffix("_kernel")
                row = {"name": name, "target": target, "K": key_dim, "V": value_dim}
                yield row | compile_launch(launch, target).as_dict()


def count_in_this_process(key_dim: int, value_dim: int) -> dict[str, dict[str, float]]:
    """Launches, and bytes written per token and head, of forward and backward, counted while they run.

    Two lengths are run and the difference taken, so that what is written once per sequence (the final state) does not
    depend on the length chosen here.
    """
    from mdn.ops.triton import backward, forward
    from mdn.ops.triton.interpreter import count_written_bytes, repair
    from mdn.ops.triton.launcher import watch_launches

    repair()
    counts: dict[int, dict[str, tuple[int, int]]] = {}
    short, long = CHUNK, 3 * CHUNK
    for time in (short, long):
        inputs, options = example_inputs(time, key_dim, value_dim)
        with watch_launches(run=True) as launches, count_written_bytes() as written:
            o, _, residual = forward(*inputs, None, None, options, True)
            forward_counts = len(launches), written.total
        with watch_launches(run=True) as launches, count_written_bytes() as written:
            backward(torch.zeros_like(o), None, *inputs, None, residual, None, options)
        counts[time] = {"forward": forward_counts, "backward": (len(launches), written.total)}
    passes = ("forward", "backward")
    return {
        "launches": {name: counts[long][name][0] for name in passes},
        "bytes": {name: (counts[long][name][1] - counts[short][name][1]) / (long - short) for name in passes},
    }


def count_launches_and_bytes(key_dim: int, value_dim: int) -> dict[str, dict[str, float]]:
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
    for row in report["kernels"]:
        if row["K"] == 128 and row["target"] in ("sm_80", "sm_90") and row["spill_bytes"]:
            broken.append(f"{row['name']} spills {row['spill_bytes']} bytes on {row['target']} at K=128")
        if row["target"] == "sm_90" and row["shared_bytes"] > SHARED_LIMIT_SM90:
            broken.append(f"{row['name']} needs {row['shared_bytes']} bytes of shared memory on sm_90 at K={row['K']}")
    return broken


if __name__ == "__main__":
    print(json.dumps(count_in_this_process(int(sys.argv[1]), int(sys.argv[2]))))

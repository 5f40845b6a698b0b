"""`mdn bench op`: the momentum delta rule against its peers, all in one process and interleaved.

Figures are ratios or times of one forward + backward in float32. Nothing is measured before every peer has been checked
against its definition. Machine-dependent numbers mean something only beside the others of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mdn.bench import op_peers as peers
from mdn.bench.op_accuracy import accuracy_table
from mdn.bench.op_peers import Shape, make_inputs, training_step
from mdn.bench.timing import interleaved, machine
from mdn.ops import SequenceBoundaries, chunk_momentum_delta_rule

WIDE = Shape(1, 2048, 4, 128, 256)
NARROW = Shape(8, 512, 4, 64, 64)
LONGEST_ATTENTION = 4096
LONGEST_PEER = 8192
SWEEP = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def run(quick: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Everything, as one dictionary. ``quick`` shrinks shapes and repeats: for a look, not for a record."""
    if threads is not None:
        torch.set_num_threads(threads)
    names, reasons = peers.runnable_peers()
    correctness = peers.check_correct(names)
    wide, narrow = (Shape(1, 128, 2, 16, 32), Shape(2, 64, 2, 16, 16)) if quick else (WIDE, NARROW)
    results: dict[str, Any] = {
        "machine": machine(),
        "quick": quick,
        "not_runnable": reasons,
        "correctness": correctness,
        "accuracy": accuracy_table(),
        "shapes": [measure_shape(shape, names, quick) for shape in (wide, narrow)],
        "lengths": measure_lengths(wide, names, quick),
        "packing": measure_packing(wide, names, quick),
        "saved_bytes_per_token_and_head": {name: saved_bytes(name, wide) for name in names},
    }
    results["bars"] = [] if quick else bars(results)
    return results


def measure_shape(shape: Shape, names: list[str], quick: bool) -> dict[str, Any]:
    """Seconds of every peer, how much faster ours is, and the share of the matmul rate of the same run."""
    inputs = make_inputs(shape)
    size = 256 if quick else 2048
    left, right = torch.randn(2, size, size)
    calls: dict[str, Callable[[], object]] = {name: training_step(name, inputs) for name in names}
    calls["matmul"] = lambda: left @ right
    seconds = interleaved(calls, repeats=2 if quick else 9, budget_seconds=2 if quick else 40, label=str(shape))
    matmul_rate = 2 * size**3 / seconds.pop("matmul")
    return {
        "shape": str(shape),
        "seconds": seconds,
        "times_faster_torch": {name: taken / seconds[peers.OURS] for name, taken in seconds.items()},
        "gflop": shape.flops() / 1e9,
        "matmul_gflop_per_second": matmul_rate / 1e9,
        "share_of_matmul_rate": {
            name: shape.flops() / seconds[name] / matmul_rate for name in names if name in (peers.OURS, peers.NATIVE)
        },
    }


def measure_lengths(shape: Shape, names: list[str], quick: bool) -> dict[str, dict[int, float]]:
    """Microseconds per token of each peer at each length, one row of the given heads. All lengths interleaved."""
    limits = {name: LONGEST_PEER for name in names if name not in (peers.OURS, peers.NATIVE, peers.ATTENTION)}
    limits[peers.ATTENTION] = LONGEST_ATTENTION
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for time in (64, 128) if quick else SWEEP:
        inputs = make_inputs(Shape(1, time, shape.heads, shape.key_dim, shape.value_dim))
        calls |= {(name, time): training_step(name, inputs) for name in names if time <= limits.get(name, time)}
    seconds = interleaved(calls, repeats=2 if quick else 4, budget_seconds=2 if quick else 120, label="lengths")
    lengths: dict[str, dict[int, float]] = {name: {} for name in names}
    for (name, time), taken in seconds.items():
        lengths[name][time] = taken / time * 1e6
    return lengths


def measure_packing(shape: Shape, names: list[str], quick: bool) -> list[dict[str, Any]]:
    """Ragged sequences packed, the same padded to whole chunks, and one sequence with as many tokens."""
    results = []
    for label, longest in (("short (1 to 64 tokens)", 64), ("mixed (1 to 512 tokens)", 512)):
        lengths = _random_lengths(longest, 256 if quick else 4096)
        padded = [-(-length // 64) * 64 for length in lengths]
        layouts = {"packed": lengths, "padded": padded, "one sequence": [sum(lengths)]}
        calls: dict[tuple[str, str], Callable[[], object]] = {
            (name, layout): _packed_step(name, shape, each)
            for name in (peers.OURS, peers.NATIVE)
            if name in names
            for layout, each in layouts.items()
        }
        seconds = interleaved(calls, repeats=2 if quick else 7, budget_seconds=2 if quick else 20, label=label)
        for name in {name for name, _ in seconds}:
            taken = {layout: seconds[name, layout] for layout in layouts}
            results.append({"pack": label, "sequences": len(lengths), "tokens": sum(lengths), "peer": name} | taken)
    return sorted(results, key=lambda row: (row["peer"], row["pack"]))


def _random_lengths(longest: int, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(longest)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(torch.randint(1, longest + 1, (), generator=generator)))
    return lengths


def _packed_step(name: str, shape: Shape, lengths: list[int]) -> Callable[[], None]:
    boundaries = SequenceBoundaries.from_lengths(lengths)
    inputs = make_inputs(Shape(1, boundaries.total, shape.heads, shape.key_dim, shape.value_dim))
    backend = "torch" if name == peers.OURS else "cpu"
    cotangent = torch.ones_like(inputs["v"])

    def step() -> None:
        o, _ = chunk_momentum_delta_rule(**inputs, cu_seqlens=boundaries, backend=backend, check_gates=False)
        torch.autograd.grad(o, list(inputs.values()), cotangent)

    return step


def saved_bytes(name: str, shape: Shape) -> float:
    """Bytes that autograd keeps between forward and backward, each storage once, per token and head."""
    inputs = make_inputs(shape)
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is used twice

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        peers.FORWARDS[name](inputs)
    return sum(kept.values()) / (shape.tokens * shape.heads)


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What the torch backend promises, what was measured, and whether it held in this run."""
    wide, narrow = (row["times_faster_torch"] for row in results["shapes"])
    per_token = results["lengths"][peers.OURS]
    rows = [
        (f"times faster than the {peers.PAPER}, {WIDE}", wide.get(peers.PAPER), ">=", 2.0),
        (f"times faster than {peers.FIRST_ORDER}, {WIDE}", wide.get(peers.FIRST_ORDER), ">=", 1.3),
        (f"times faster than the {peers.PAPER}, {NARROW}", narrow.get(peers.PAPER), ">=", 3.0),
        ("time per token at T=32768 over T=2048", per_token[32768] / per_token[2048], "<=", 1.15),
        (f"bytes saved per token and head, {WIDE}", results["saved_bytes_per_token_and_head"][peers.OURS], "<=", 6000),
    ]
    for row in results["packing"]:
        if row["peer"] == peers.OURS:
            rows.append((f"packed over padded, {row['pack']}", row["packed"] / row["padded"], "<=", 1.0))
    return [
        {"what": what, "measured": measured, "bar": f"{sign} {bar:g}", "met": _met(measured, sign, bar)}
        for what, measured, sign, bar in rows
        if measured is not None
    ]


def _met(measured: float, sign: str, bar: float) -> bool:
    return measured >= bar if sign == ">=" else measured <= bar

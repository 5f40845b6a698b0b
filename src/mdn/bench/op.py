"""`mdn bench op`: the momentum delta rule against its peers, all in one process and interleaved.

Figures are ratios or times of one forward + backward in float32 (vectors in bfloat16 for the kernels that only run on a
GPU). Nothing is measured before every peer has been checked against its definition. Machine-dependent numbers mean
something only beside the others of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mdn.bench import op_peers as peers
from mdn.bench.op_accuracy import accuracy_table
from mdn.bench.op_peers import RuleShape, make_inputs, training_step
from mdn.bench.op_results import CONTROL, too_busy
from mdn.bench.timing import interleaved, machine
from mdn.ops import SequenceBoundaries, momentum_delta_step

WIDE = RuleShape(1, 2048, 4, 128, 256)
NARROW = RuleShape(8, 512, 4, 64, 64)
LONGEST_ATTENTION = 4096
LONGEST_PEER = 8192
THREADS = "native: one thread's time over two threads'"
SWEEP = (512, 2048, 8192, 32768)


def run(quick: bool = False, threads: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Everything, as one dictionary. ``quick`` shrinks shapes and repeats: not for figures that are recorded. On a GPU
    ("cuda") there are no bars, and threads are not compared."""
    if threads is not None:
        torch.set_num_threads(threads)
    names, reasons = peers.runnable_peers(device)
    correctness = peers.check_correct(names, device)
    wide, narrow = (RuleShape(1, 128, 2, 16, 32), RuleShape(2, 64, 2, 16, 16)) if quick else (WIDE, NARROW)
    results: dict[str, Any] = {
        "machine": machine(device),
        "quick": quick,
        "not_runnable": reasons,
        "correctness": correctness,
        "accuracy": accuracy_table(device=device),
        "shapes": [measure_shape(shape, names, quick, device) for shape in (wide, narrow)],
        "lengths": measure_lengths(wide, names, quick, device),
        "packing": measure_packing(wide, names, quick, device),
        "scaling": measure_scaling(wide, names, quick) if device == "cpu" else {},
        "decode": measure_decode(names, quick, device) if set(names) & {peers.NATIVE, peers.TRITON} else None,
        "saved_bytes_per_token_and_head": {name: saved_bytes(name, wide, device) for name in names},
    }
    results["bars"] = [] if quick or device != "cpu" else bars(results)
    return results


def measure_shape(shape: RuleShape, names: list[str], quick: bool, device: str = "cpu") -> dict[str, Any]:
    """Seconds of every peer, how much faster ours is, and the share of the matmul rate of the same run."""
    inputs = make_inputs(shape, device=device)
    size = 256 if quick else 2048
    left, right = torch.randn(2, size, size, device=device)
    calls: dict[str, Callable[[], object]] = {name: training_step(name, inputs) for name in names}
    calls["matmul"] = lambda: left @ right
    seconds = interleaved(calls, repeats=2 if quick else 25, budget_seconds=2 if quick else 40, label=str(shape))
    matmul_rate = 2 * size**3 / seconds.pop("matmul")
    return {
        "shape": str(shape),
        "seconds": seconds,
        "times_faster_torch": _times_faster(seconds, peers.OURS),
        "gflop": shape.flops() / 1e9,
        "matmul_gflop_per_second": matmul_rate / 1e9,
        "share_of_matmul_rate": {
            name: shape.flops() / seconds[name] / matmul_rate for name in names if name in peers.BACKENDS
        },
    }


def measure_lengths(
    shape: RuleShape, names: list[str], quick: bool, device: str = "cpu"
) -> dict[str, dict[int, float]]:
    """Microseconds per token of each peer at each length, one row of the given heads. All lengths interleaved.

    A sample is as many calls as make up the tokens of the peer's longest length: on a machine with other work, the
    minimum over many short samples would be compared with that over few long ones.
    """
    times = (64, 128) if quick else SWEEP
    longest = dict.fromkeys(names, LONGEST_PEER) | {peers.ATTENTION: LONGEST_ATTENTION}
    longest |= dict.fromkeys(peers.BACKENDS, max(times))
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    tokens = {name: max(time for time in times if time <= longest[name]) for name in names}
    for time in times:
        inputs = make_inputs(RuleShape(1, time, shape.heads, shape.key_dim, shape.value_dim), device=device)
        for name in names:
            if time <= longest[name]:
                calls[name, time] = _repeated(training_step(name, inputs), tokens[name] // time)
    seconds = interleaved(calls, repeats=2 if quick else 5, budget_seconds=2 if quick else 150, label="lengths")
    lengths: dict[str, dict[int, float]] = {name: {} for name in names}
    for (name, time), taken in seconds.items():
        lengths[name][time] = taken / tokens[name] * 1e6
    return lengths


def _repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(count):
            call()

    return calls


def measure_packing(shape: RuleShape, names: list[str], quick: bool, device: str = "cpu") -> list[dict[str, Any]]:
    """Ragged sequences packed, the same padded to whole chunks, and one sequence with as many tokens."""
    results = []
    for label, longest in (("short (1 to 64 tokens)", 64), ("mixed (1 to 512 tokens)", 512)):
        lengths = _random_lengths(longest, 256 if quick else 4096)
        padded = [-(-length // 64) * 64 for length in lengths]
        layouts = {"packed": lengths, "padded": padded, "one sequence": [sum(lengths)]}
        calls: dict[tuple[str, str], Callable[[], object]] = {
            (name, layout): _packed_step(name, shape, each, device)
            for name in peers.BACKENDS
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


def _packed_step(name: str, shape: RuleShape, lengths: list[int], device: str) -> Callable[[], None]:
    boundaries = SequenceBoundaries.from_lengths(lengths, device)
    inputs = make_inputs(RuleShape(1, boundaries.total, shape.heads, shape.key_dim, shape.value_dim), device=device)
    cotangent = torch.ones_like(inputs["v"])

    def step() -> None:
        o = peers.ours(name, inputs, cu_seqlens=boundaries)
        torch.autograd.grad(o, list(inputs.values()), cotangent)

    return step


def measure_scaling(shape: RuleShape, names: list[str], quick: bool) -> dict[str, float]:
    """How many times faster two threads are than one. A matrix product is the control: it always scales, unless other
    work on the machine leaves no second core."""
    inputs = make_inputs(shape)
    before = torch.get_num_threads()
    left, right = torch.randn(2, 1024, 1024)
    steps: dict[str, Callable[[], object]] = {
        name: training_step(name, inputs) for name in (peers.OURS, peers.NATIVE) if name in names
    }
    steps[CONTROL] = lambda: left @ right

    def with_threads(threads: int, step: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            torch.set_num_threads(threads)
            step()

        return call

    calls: dict[tuple[str, int], Callable[[], object]] = {
        (name, threads): with_threads(threads, step) for name, step in steps.items() for threads in (1, 2)
    }
    seconds = interleaved(calls, repeats=2 if quick else 25, budget_seconds=2 if quick else 20, label="scaling")
    torch.set_num_threads(before)
    return {name: seconds[name, 1] / seconds[name, 2] for name in steps}


def measure_decode(names: list[str], quick: bool, device: str = "cpu") -> dict[str, Any]:
    """Seconds of one decode step per backend, and of scaling both states in place once: the least that any step can
    read and write."""
    heads, key_dim, value_dim = (2, 16, 32) if quick else (6, 128, 256)
    rows = []
    for batch in (1, 16):
        one = make_inputs(RuleShape(batch, 1, heads, key_dim, value_dim), device=device)
        token = {name: x.detach()[:, 0].contiguous() for name, x in one.items()}
        state = torch.zeros(2, batch, heads, key_dim, value_dim, device=device)
        settings: dict[str, Any] = {"p": None, "state": state, "check_gates": False}
        calls: dict[str, Callable[[], object]] = {
            name: partial(momentum_delta_step, **peers.inputs_for(name, token), backend=backend, **settings)
            for name, backend in peers.BACKENDS.items()
            if name in names
        }
        calls["scale both states"] = partial(state.mul_, 0.999)
        seconds = interleaved(calls, repeats=5 if quick else 200, budget_seconds=5, label=f"decode, batch {batch}")
        rows.append({"batch": batch, "seconds": seconds})
    return {"shape": f"H{heads} K{key_dim} V{value_dim}", "rows": rows}


def saved_bytes(name: str, shape: RuleShape, device: str = "cpu") -> float:
    """Bytes that autograd keeps between forward and backward, each storage once, per token and head."""
    inputs = make_inputs(shape, device=device)
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
    """What the two CPU backends promise, what was measured, and whether it held in this run (None: not judged, because
    the machine was too busy to tell)."""
    rows = [*_torch_bars(results), *(_native_bars(results) if results["decode"] is not None else [])]
    judged: list[dict[str, Any]] = [
        {"what": what, "measured": measured, "bar": f"{sign} {bar:g}", "met": _met(measured, sign, bar)}
        for what, measured, sign, bar in rows
        if measured is not None
    ]
    if too_busy(results["scaling"]):
        judged = [bar | {"met": None} if bar["what"] == THREADS else bar for bar in judged]
    return judged


Bar = tuple[str, float | None, str, float]


def _torch_bars(results: dict[str, Any]) -> list[Bar]:
    wide, narrow = (_times_faster(row["seconds"], peers.OURS) for row in results["shapes"])
    per_token = results["lengths"][peers.OURS]
    saved = results["saved_bytes_per_token_and_head"][peers.OURS]
    rows: list[Bar] = [
        (f"torch: times faster than the {peers.PAPER}, {WIDE}", wide.get(peers.PAPER), ">=", 2.0),
        (f"torch: times faster than {peers.FIRST_ORDER}, {WIDE}", wide.get(peers.FIRST_ORDER), ">=", 1.3),
        (f"torch: times faster than the {peers.PAPER}, {NARROW}", narrow.get(peers.PAPER), ">=", 3.0),
        ("torch: time per token at T=32768 over T=2048", per_token[32768] / per_token[2048], "<=", 1.15),
        (f"torch: bytes saved per token and head, {WIDE}", saved, "<=", 6000),
    ]
    for row in results["packing"]:
        if row["peer"] == peers.OURS:
            rows.append((f"torch: packed over padded, {row['pack']}", row["packed"] / row["padded"], "<=", 1.0))
    return rows


def _native_bars(results: dict[str, Any]) -> list[Bar]:
    wide, narrow = (_times_faster(row["seconds"], peers.NATIVE) for row in results["shapes"])
    decode = results["decode"]["rows"][-1]["seconds"]
    share = results["shapes"][0]["share_of_matmul_rate"][peers.NATIVE]
    return [
        (f"native: times faster than the {peers.PAPER}, {WIDE}", wide.get(peers.PAPER), ">=", 4.0),
        (f"native: times faster than {peers.FIRST_ORDER}, {WIDE}", wide.get(peers.FIRST_ORDER), ">=", 2.5),
        (f"native: share of the matmul rate, {WIDE}", share, ">=", 0.9),
        (f"native: times faster than the {peers.PAPER}, {NARROW}", narrow.get(peers.PAPER), ">=", 8.0),
        (THREADS, results["scaling"][peers.NATIVE], ">=", 1.8),
        (
            f"native: decode step over scaling the states, batch 16, {results['decode']['shape']}",
            decode[peers.NATIVE] / decode["scale both states"],
            "<=",
            1.8,
        ),
    ]


def _times_faster(seconds: dict[str, float], ours: str) -> dict[str, float]:
    return {name: taken / seconds[ours] for name, taken in seconds.items()}


def _met(measured: float, sign: str, bar: float) -> bool:
    return measured >= bar if sign == ">=" else measured <= bar

"""Estimated time of one layer's op on an absent GPU, from machine code: ours and FLA's in the same way.

For every launch of forward + backward the estimate is the largest of
    latency  static cycles of a program (`timeline.walk`) times the rounds of programs that the SMs take
    issue    the instructions of all resident warps, four a cycle
    DRAM     every tensor that the launch was given, moved once, but no more than its warps request
    L2       what warps request, if all lanes take part
    tensor   operations of the tensor cores at half their peak
and the op is the sum of its launches. It is an estimate, not a measurement: `calibrate` compares such sums with the two
published times of FLA's forward passes that there are. Of our kernels, of backward passes and of other GPUs nothing has
been compared, and how far the ratios are off is not known.

Launches are recorded at two short lengths on the CPU; programs and bytes are linear in the length. Of an autotuner's
list a few entries are compiled, and each launch takes the one with the smallest estimate.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from mdn.bench.emulator.launch import replace_triton, tile_of
from mdn.bench.gpu.compiling import Resources, machine_code, read_nvidia
from mdn.bench.gpu.runs import RUNS, Size
from mdn.bench.gpu.timeline import Timeline, parse, walk
from mdn.ops.triton.tiles import assume_target

CHUNK = 64
LENGTHS = (512, 1024)
ENTRIES_TRIED = 6


@dataclass(frozen=True)
class Gpu:
    """What the estimate knows of a GPU. Bandwidths in bytes a second, as far as kernels reach them."""

    sms: int
    clock: float
    dram: float
    l2: float
    flops: float
    registers: int
    shared: int
    """bytes of an SM that blocks can use"""


GPUS = {
    "sm_90": Gpu(132, 1.755e9, 0.85 * 3.35e12, 5.5e12, 0.5 * 989e12, 65536, 233_472),  # H100 SXM
    "sm_80": Gpu(108, 1.41e9, 0.85 * 2.0e12, 4.0e12, 0.5 * 312e12, 65536, 167_936),  # A100
}
H20 = Gpu(78, 1.98e9, 0.85 * 4.0e12, 4.0e12, 0.5 * 148e12, 65536, 233_472)
"""executes code for sm_90; the GPU for which there are published times"""


@dataclass(frozen=True)
class Analysis:
    """One compiled kernel."""

    name: str
    warps: int
    resources: Resources
    timeline: Timeline
    register_products: int
    """wgmma whose first operand comes from registers: ptxas before 13.3 may overwrite it while it is being read"""

    def blocks_per_sm(self, gpu: Gpu) -> int:
        """How many blocks an SM holds, by registers, shared memory and threads."""
        registers = math.ceil(self.resources.registers / 8) * 8 * 32 * self.warps
        shared = self.resources.shared_bytes + 1024
        return min(gpu.registers // registers, gpu.shared // shared, 64 // self.warps, 32)

    def as_dict(self, gpu: Gpu, scan: bool, columns: int | None = None) -> dict[str, float]:
        """What a program needs: of a scan per chunk, and per V column if it has ``columns``."""
        span = self.span(scan)
        per_column = {"cycles_per_column": round(span.cycles / columns, 1)} if scan and columns else {}
        return {
            "cycles": round(span.cycles),
            **per_column,
            "blocks_per_sm": self.blocks_per_sm(gpu),
            "barriers": span.barriers,
            "copies_in_flight": span.copies_in_flight,
            "loads_after_a_wait": span.loads_after_a_wait,
            "register_products": self.register_products,
        }

    def cycles(self, scan: bool) -> float:
        """Of a program, or of one turn of its loop over chunks."""
        return self.span(scan).cycles

    def span(self, scan: bool) -> Timeline:
        """What counts of the timeline: one chunk of a program that walks along a sequence, or all of any other."""
        return self.timeline.turn if scan and self.timeline.turn is not None else self.timeline

    def times(self, gpu: Gpu, programs: float, tensor_bytes: float, chunks: int | None) -> dict[str, float]:
        """Seconds of each term; ``chunks`` of a program that walks along a sequence, or None."""
        span, turns = self.span(chunks is not None), chunks or 1
        resident = max(1, self.blocks_per_sm(gpu))
        rounds = programs / (gpu.sms * resident)
        if chunks is not None:
            # A program walks as long as its sequence: the last round is as long as the first.
            rounds = math.ceil(rounds)
        work = programs * turns * self.warps
        requested = work * span.bytes_moved
        return {
            "latency": rounds * turns * span.cycles / gpu.clock,
            "issue": rounds * turns * resident * span.issued * self.warps / (4 * gpu.clock),
            "DRAM": min(tensor_bytes, requested) / gpu.dram,
            "L2": requested / gpu.l2,
            "tensor": work * span.flops / gpu.flops,
        }


def register_products(ptx: str) -> int:
    """How many wgmma take their first operand from registers, written in braces, and not from shared memory."""
    return len(re.findall(r"wgmma\.mma_async[^{;]*\{[^}]*\}\s*,\s*\{", ptx))


_analyses: dict[str, Analysis] = {}


def analyse(compiled: Any) -> Analysis:
    """Resources and timeline of what Triton compiled."""
    if compiled.hash not in _analyses:
        timeline = walk(parse(machine_code(compiled)))
        metadata = compiled.metadata
        products = register_products(compiled.asm["ptx"])
        _analyses[compiled.hash] = Analysis(
            metadata.name, metadata.num_warps, read_nvidia(compiled), timeline, products
        )
    return _analyses[compiled.hash]


@dataclass(frozen=True)
class Recorded:
    """One launch: the compiled kernel, how many programs, the bytes of its tensors."""

    analysis: Analysis
    programs: int
    tensor_bytes: int
    tile: dict[str, int | None]


class Recorder:
    """Stands in for the emulator in `replace_triton`: compiles and notes launches, and runs nothing."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.launches: list[Recorded] = []

    def run(self, compiled: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        tensors = {x.data_ptr(): x.numel() * x.element_size() for x in arguments.values() if isinstance(x, Tensor)}
        moved = sum(tensors.values())
        self.launches.append(Recorded(analyse(compiled), math.prod(grid), moved, tile_of(compiled, arguments)))


class Entries:
    """Which entry of every autotuner's list a call takes: ``number`` of the few that are tried, evenly spread."""

    def __init__(self, number: int, gpu: Gpu) -> None:
        self.number, self.gpu = number, gpu
        self.longest = 1
        """the most entries that a list of this call had to offer"""

    def of(self, tuner: Any, kwargs: dict[str, Any], configs: list[Any]) -> list[Any]:
        """The one entry to take. One that does not compile or fit would not be taken on a GPU: the next one is."""
        few = min(ENTRIES_TRIED, len(configs))
        tried = [configs[round(place * (len(configs) - 1) / max(1, few - 1))] for place in range(few)]
        self.longest = max(self.longest, few)
        for turn in range(few):
            config = tried[(self.number + turn) % few]
            if _fits(tuner, kwargs, config, self.gpu):
                return [config]
        raise ValueError(f"no entry of the autotuner of {tuner.base_fn.__name__} compiles and fits")

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        from triton.runtime.autotuner import Autotuner

        prune = Autotuner.prune_configs

        def take(tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
            return self.of(tuner, kwargs, prune(tuner, kwargs))

        with mock.patch.object(Autotuner, "prune_configs", take):
            yield


def _fits(tuner: Any, kwargs: dict[str, Any], config: Any, gpu: Gpu) -> bool:
    options = {**kwargs, **config.all_kwargs(), "warmup": True}
    try:
        compiled = tuner.fn.run(*tuner.nargs.values(), **options)
    except Exception:  # whatever the compiler says of an entry, it is not a candidate
        return False
    return analyse(compiled).blocks_per_sm(gpu) > 0


Op = Callable[[Size, int], None]
"""``op(size, length)`` makes the launches of one sequence"""


def estimate(op: Op, size: Size, target: str, batch: int, time: int, gpu: Gpu | None = None) -> list[dict[str, Any]]:
    """One row per launch of ``op``: what a program needs (of a scan: per chunk), the estimated milliseconds and the
    term that decides. ``gpu`` executes code for ``target``, and is `GPUS[target]` if not given."""
    chosen = gpu or GPUS[target]
    first, entries = _estimate_entry(0, op, size, target, batch, time, chosen)
    others = [_estimate_entry(number, op, size, target, batch, time, chosen)[0] for number in range(1, entries)]
    return [min(rows, key=lambda row: row["ms"]) for rows in zip(first, *others, strict=True)]


def _estimate_entry(
    number: int, op: Op, size: Size, target: str, batch: int, time: int, gpu: Gpu
) -> tuple[list[dict[str, Any]], int]:
    """The rows with one entry of every autotuner's list, and how many entries there are to try."""
    entries = Entries(number, gpu)
    with entries.taken():
        short, long = (record(op, size, target, length) for length in LENGTHS)
    if [launch.analysis.name for launch in short] != [launch.analysis.name for launch in long]:
        raise ValueError("the launches of an op must not depend on the length of the sequence")
    rows = []
    for a, b in zip(short, long):
        programs = batch * _extrapolate(a.programs, b.programs, time)
        moved = batch * _extrapolate(a.tensor_bytes, b.tensor_bytes, time)
        found = b.analysis
        walks = found.timeline.turn is not None and a.programs == b.programs and a.tensor_bytes != b.tensor_bytes
        times = found.times(gpu, programs, moved, time // CHUNK if walks else None)
        bound = max(times, key=lambda term: times[term])
        row = {"name": found.name.removesuffix("_kernel"), "programs": round(programs), "ms": 1e3 * times[bound]}
        rows.append(row | {"bound": bound} | b.tile | found.as_dict(gpu, walks, b.tile["columns"]))
    return rows, entries.longest


def _extrapolate(short: float, long: float, time: int) -> float:
    slope = (long - short) / (LENGTHS[1] - LENGTHS[0])
    return long + slope * (time - LENGTHS[1])


def record(op: Op, size: Size, target: str, length: int) -> list[Recorded]:
    """The launches of one call, compiled for the target."""
    recorder = Recorder(target)
    with replace_triton(recorder):  # type: ignore[arg-type]
        op(size, length)
    return recorder.launches


SIZES = ((Size(6, 128, 256), Size(8, 128, 128)), (Size(6, 256, 512), Size(16, 128, 128)))
"""widths of the paper's two models, and KDA's heads in models of the same size"""


def estimate_times(op: str, target: str) -> Iterator[dict[str, Any]]:
    """Rows of forward + backward at B=8, T=4096, estimated from machine code, one per launch: ours, FLA's GDN of the
    same size, and KDA with the head counts of the paper's models of that size (``heads``)."""
    for size, kda in SIZES:
        of = kda if op == "kda" else size
        with assume_target(target):
            for row in estimate(RUNS[op], of, target, batch=8, time=4096):
                yield {"target": target, "size": str(size), "op": op, "heads": str(of)} | row


PUBLISHED = {"gdn": 3.20, "kda": 4.84}
"""milliseconds of FLA's forward passes on an H20 with one sequence of 8192 tokens, 96 heads and K = V = 128, from the
benchmark page of FlashKDA"""


def calibrate() -> Iterator[dict[str, Any]]:
    """Published times beside what the estimate says of the same launches."""
    for name, published in PUBLISHED.items():
        forward = functools.partial(RUNS[name], backward=False)
        with assume_target("sm_90"):
            rows = estimate(forward, Size(96, 128, 128), "sm_90", batch=1, time=8192, gpu=H20)
        estimated = sum(row["ms"] for row in rows)
        yield {"op": name, "published_ms": published, "estimated_ms": estimated, "factor": published / estimated}

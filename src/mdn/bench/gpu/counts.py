"""What compiled kernels execute per token and head, counted while the emulator runs them: ours and FLA's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mdn.bench.emulator.execute import Counts, count_mma
from mdn.bench.emulator.launch import EmulatedGPU, replace_triton
from mdn.bench.gpu.runs import DECODES, RUNS, Size
from mdn.ops.triton.tiles import assume_target

SIZE = Size(2, 128, 128)
LARGE = Size(1, 256, 512)
"""the widths of the paper's larger model"""
TOKENS = 256
PASSES = {"forward": TOKENS, "backward": TOKENS, "decode": 1}
"""the passes in the order in which they run, and the tokens of each"""


def _figures(run: Counts) -> dict[str, float]:
    return {
        "warp_instructions": run.warp_instructions,
        "mma": run.mma,
        "barriers": run.barriers,
        "sectors": run.sectors("load") + run.sectors("store"),
        "sectors_distinct": run.sectors("load", distinct=True) + run.sectors("store", distinct=True),
        "wavefronts": run.wavefronts(),
        "wavefronts_ideal": run.wavefronts(True),
    }


@dataclass
class Passes:
    """Splits what a GPU has counted into passes; a kernel that runs in both is there twice."""

    gpu: EmulatedGPU
    heads: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    _before: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    _remaining: Iterator[tuple[str, int]] = field(default_factory=lambda: iter(PASSES.items()))

    def close(self) -> None:
        """Called after each pass."""
        which, tokens = next(self._remaining)
        for name, runs in self.gpu.counts.items():
            for number, run in enumerate(runs):
                now, before = _figures(run), self._before.get((name, number), {})
                new = {figure: value - before.get(figure, 0) for figure, value in now.items()}
                self._before[name, number] = now
                if new["warp_instructions"]:
                    per_token = {figure: value / (tokens * self.heads) for figure, value in new.items()}
                    row = {"pass": which, "name": name.removesuffix("_kernel")} | run.tile
                    self.rows.append(row | per_token)


def count_executed(op: str, target: str, size: Size = SIZE) -> list[dict[str, Any]]:
    """One row per pass and kernel of an op in bfloat16."""
    gpu = EmulatedGPU(target, count=True)
    passes = Passes(gpu, size.heads)
    with assume_target(target), replace_triton(gpu):
        RUNS[op](size, TOKENS, passes.close)
        DECODES[op](size)
        passes.close()
    return [{"target": target, "op": op} | row for row in passes.rows]


def dearest_lines(op: str, target: str, lines: int) -> Iterator[dict[str, Any]]:
    """The source lines of each kernel that execute most warp instructions, and those with most bank conflicts. The
    barriers of a line count once per warp, where those of a kernel count once per block."""
    gpu = EmulatedGPU(target, count=True)
    with assume_target(target), replace_triton(gpu):
        RUNS[op](SIZE, TOKENS)
    for name, runs in gpu.counts.items():
        for run in runs:
            found = {line: figures_of_line(run, line) for line in run.opcodes_by_place}
            busiest = sorted(found, key=lambda line: -found[line]["warp_instructions"])[:lines]
            extra = {line: figures["wavefronts"] - figures["wavefronts_ideal"] for line, figures in found.items()}
            conflicts = [line for line in sorted(extra, key=lambda line: -extra[line])[:3] if extra[line]]
            for line in dict.fromkeys([*busiest, *conflicts]):
                per_token = {figure: value / (TOKENS * SIZE.heads) for figure, value in found[line].items()}
                yield {"op": op, "name": name.removesuffix("_kernel"), "line": line} | per_token


def figures_of_line(run: Counts, line: str) -> dict[str, float]:
    opcodes = run.opcodes_by_place[line]
    memory: Counter[str] = Counter()
    for place, counter in run.memory_by_place.items():
        if place.split()[0] == line:
            memory += counter
    return {
        "warp_instructions": opcodes.total(),
        "mma": count_mma(opcodes),
        "barriers": sum(n for opcode, n in opcodes.items() if opcode.startswith("bar.sync")),
        "sectors": memory["global load sectors"] + memory["global store sectors"],
        "sectors_distinct": memory["global load distinct sectors"] + memory["global store distinct sectors"],
        "wavefronts": sum(n for what, n in memory.items() if what.endswith(" wavefronts")),
        "wavefronts_ideal": sum(n for what, n in memory.items() if what.endswith(" wavefronts without conflicts")),
    }

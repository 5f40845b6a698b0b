"""What compiled kernels execute per token and head, counted while the emulator runs them: ours and FLA's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mdn.bench.emulator.execute import Counts
from mdn.bench.emulator.launch import EmulatedGPU, replace_triton
from mdn.bench.gpu.estimate import Size, run_gdn, run_kda, run_mdn
from mdn.ops.triton.tiles import assume_target

OPS = {"mdn": run_mdn, "gdn": run_gdn, "kda": run_kda}
SIZE = Size(2, 128, 128)
TOKENS = 256


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
    rows: list[dict[str, Any]] = field(default_factory=list)
    _before: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    _names: Iterator[str] = field(default_factory=lambda: iter(("forward", "backward")))

    def close(self) -> None:
        """Called after each pass."""
        which = next(self._names)
        for name, runs in self.gpu.counts.items():
            for number, run in enumerate(runs):
                now, before = _figures(run), self._before.get((name, number), {})
                new = {figure: value - before.get(figure, 0) for figure, value in now.items()}
                self._before[name, number] = now
                if new["warp_instructions"]:
                    per_token = {figure: value / (TOKENS * SIZE.heads) for figure, value in new.items()}
                    self.rows.append({"pass": which, "name": name.removesuffix("_kernel")} | per_token)


def count_executed(op: str, target: str) -> list[dict[str, Any]]:
    """One row per pass and kernel of an op at K = V = 128, bfloat16."""
    gpu = EmulatedGPU(target, count=True)
    passes = Passes(gpu)
    run: Callable[..., None] = OPS[op]
    with assume_target(target), replace_triton(gpu):
        run(SIZE, TOKENS, passes.close)
    return [{"target": target, "op": op} | row for row in passes.rows]


def dearest_lines(target: str, lines: int) -> Iterator[dict[str, Any]]:
    """The source lines of our kernels that execute most warp instructions, and those with bank conflicts."""
    gpu = EmulatedGPU(target, count=True)
    with assume_target(target), replace_triton(gpu):
        run_mdn(SIZE, TOKENS)
    per = TOKENS * SIZE.heads
    for name, runs in gpu.counts.items():
        for run in runs:
            conflicts: Counter[str] = Counter()
            for place, counter in run.memory_by_place.items():
                line = place.split()[0]
                for what, times in counter.items():
                    if what.endswith(" wavefronts"):
                        conflicts[line] += times - counter[f"{what} without conflicts"]
            for line in dict.fromkeys([*dict(run.places.most_common(lines)), *dict(conflicts.most_common(3))]):
                row = {"name": name.removesuffix("_kernel"), "line": line, "warp_instructions": run.places[line] / per}
                yield row | {"wavefronts_by_conflicts": conflicts[line] / per}

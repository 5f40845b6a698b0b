"""Runs a kernel for a whole grid: some CTAs at a time, all their lanes together, block by block.

Lanes that part ways at a branch are kept as a mask per block. The earliest block in the program always runs next, so
lanes that took different ways meet again at the first block they share. Lanes at a CTA barrier wait until all live
lanes of their CTA have arrived.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mdn.bench.emulator.exhaustive import DETECTORS
from mdn.bench.emulator.instructions import Builder, Run
from mdn.bench.emulator.machine import Fault, GlobalMemory, Lanes, Machine, Mask
from mdn.bench.emulator.ptx import Instruction, Kernel
from mdn.bench.emulator.races import Check

AXES = ("x", "y", "z")


def count_mma(opcodes: Counter[str]) -> int:
    """Tensor-core instructions; a wgmma of four warps counts four times."""
    return sum(n for opcode, n in opcodes.items() if opcode.startswith(("mma.sync", "wgmma.mma_async")))


@dataclass
class Counts:
    """What executed, over all runs of a kernel. Instructions count once per warp."""

    opcodes: Counter[str] = field(default_factory=Counter)
    opcodes_by_place: dict[str, Counter[str]] = field(default_factory=dict)  # by line of the Triton source
    memory: Counter[str] = field(default_factory=Counter)  # sectors and wavefronts
    memory_by_place: dict[str, Counter[str]] = field(default_factory=dict)
    barriers: int = 0
    tile: dict[str, int | None] = field(default_factory=dict)  # `launch.tile_of`

    @property
    def warp_instructions(self) -> int:
        return self.opcodes.total()

    @property
    def mma(self) -> int:
        return count_mma(self.opcodes)

    def wavefronts(self, without_conflicts: bool = False) -> int:
        ending = " wavefronts without conflicts" if without_conflicts else " wavefronts"
        return sum(n for what, n in self.memory.items() if what.endswith(ending))

    def sectors(self, kind: str, distinct: bool = False) -> int:
        return self.memory[f"global {kind} {'distinct sectors' if distinct else 'sectors'}"]


@dataclass
class Batch:
    """Everything that is built once for a number of CTAs that run together."""

    machine: Machine
    builder: Builder
    special: dict[str, Lanes]
    blocks: list[list[Run] | None]  # built when first reached


class Program:
    """A kernel, ready to run on grids of any size."""

    def __init__(self, kernel: Kernel, shared_bytes: int, check: Check = False, count: bool = False, lanes: int = 4096):
        self.kernel, self.shared_bytes, self.check, self.count = kernel, shared_bytes, check, count
        self.ctas_at_once = max(1, lanes // kernel.threads)
        self.counts = Counts()
        self.races: Counter[str] = Counter()
        self._batches: dict[int, Batch] = {}  # by number of CTAs

    def run(self, grid: tuple[int, ...], parameters: list[NDArray[np.uint64]], memory: GlobalMemory) -> None:
        """``parameters``: one-element arrays in the order of the kernel's, in the bits of their types."""
        sizes = (*grid, 1, 1)[:3]
        named = {name: value for (name, _), value in zip(self.kernel.parameters, parameters)}
        total = int(np.prod(sizes))
        global_races = None
        if self.check:
            global_races = DETECTORS[self.check][1](self.kernel.threads, total, len(memory.bytes))
        with np.errstate(all="ignore"):
            for first in range(0, total, self.ctas_at_once):
                ctas = np.arange(first, min(total, first + self.ctas_at_once))
                batch = self._start(ctas, sizes, named)
                if global_races:
                    global_races.first_cta = first
                batch.machine.start(memory, global_races)
                _Run(self.kernel, batch, self.counts).until_done()
                self._collect(batch.machine)
        if global_races:
            global_races.finish()
            self.races += global_races.found
        self._collect_touched(memory)

    def _start(self, ctas: Lanes, grid: tuple[int, ...], parameters: dict[str, NDArray[np.uint64]]) -> Batch:
        if len(ctas) not in self._batches:
            self._batches[len(ctas)] = self._build(len(ctas))
        batch = self._batches[len(ctas)]
        cta = np.repeat(ctas, self.kernel.threads)
        for axis, index in zip(AXES, (cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1]))):
            batch.special[f"%ctaid.{axis}"][:] = index
        for axis, size in zip(AXES, grid):
            batch.special[f"%nctaid.{axis}"][:] = size
        batch.builder.start(parameters)
        return batch

    def _build(self, ctas: int) -> Batch:
        machine = Machine(self.kernel.threads, ctas, self.shared_bytes, self.check, self.count)
        names = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in AXES]
        special = {name: np.zeros(machine.num_lanes, np.uint32) for name in (*names, "%laneid", "%warpid")}
        thread = (machine.every_lane % self.kernel.threads).astype(np.uint32)
        special["%tid.x"][:], special["%laneid"][:], special["%warpid"][:] = thread, thread % 32, thread // 32
        for axis, size in zip(AXES, (self.kernel.threads, 1, 1)):
            special[f"%ntid.{axis}"][:] = size
        return Batch(machine, Builder(self.kernel, machine, special), special, [None] * len(self.kernel.blocks))

    def _collect(self, machine: Machine) -> None:
        if machine.races:
            machine.races.finish()
            self.races += machine.races.found
        for place, counter in machine.counters.items():
            self.counts.memory += counter
            self.counts.memory_by_place.setdefault(place, Counter()).update(counter)
        machine.counters.clear()

    def _collect_touched(self, memory: GlobalMemory) -> None:
        """Sectors that a launch touched at all, of every source line and of the kernel: lines may share them."""
        for kind in ("load", "store"):
            what = f"global {kind} distinct sectors"
            lines = {line: touched for (of, line), touched in memory.touched.items() if of == kind}
            for line, touched in lines.items():
                self.counts.memory_by_place.setdefault(line, Counter())[what] += int(touched.sum())
            if lines:
                self.counts.memory[what] += int(np.logical_or.reduce(list(lines.values())).sum())


class _Run:
    """One batch of CTAs from the first block to the last return."""

    def __init__(self, kernel: Kernel, batch: Batch, counts: Counts):
        self.kernel, self.batch, self.counts = kernel, batch, counts
        self.machine = batch.machine
        self.ready: dict[int, Mask] = {0: True}  # block -> lanes that will run it
        self.live = np.ones(self.machine.num_lanes, bool)
        self.resume_at = np.full(self.machine.num_lanes, -1)  # block after the barrier that a lane waits at

    def until_done(self) -> None:
        while self.ready:
            index = min(self.ready)
            mask = self.ready.pop(index)
            for run in self._block(index):
                run(mask)
            self._count(index, mask)
            self._leave(index, mask)
        if (self.resume_at >= 0).any():
            raise Fault(f"{self.kernel.name}: threads wait at a barrier that others never reach")

    def _block(self, index: int) -> list[Run]:
        block = self.batch.blocks[index]
        if block is None:
            instructions = [x for x in self.kernel.blocks[index] if not x.ends_block]
            block = self.batch.blocks[index] = [self.batch.builder.build(x) for x in instructions]
        return block

    def _count(self, index: int, mask: Mask) -> None:
        lanes = np.broadcast_to(mask, self.machine.num_lanes).reshape(-1, 32)
        warps = int(lanes.any(1).sum())
        for instruction in self.kernel.blocks[index]:
            self.counts.opcodes[instruction.opcode] += warps
            self.counts.opcodes_by_place.setdefault(instruction.place, Counter())[instruction.opcode] += warps

    def _leave(self, index: int, mask: Mask) -> None:
        block = self.kernel.blocks[index]
        last = block[-1] if block and block[-1].ends_block else None
        if last is None:
            self._go(index + 1, mask)
        elif last.is_cta_barrier:
            self._wait(last, index, mask)
        elif last.name == "bra":
            self._branch(last, index, mask)
        elif last.name == "trap":
            raise Fault(f"{last}: trap")
        else:
            leaving = self._guarded(last, mask)
            self.live &= ~leaving
            staying = np.broadcast_to(mask, len(leaving)) & ~leaving
            if staying.any():
                self._go(index + 1, staying)
            self._release()  # threads that have returned are not waited for

    def _go(self, block: int, mask: Mask) -> None:
        if block in self.ready and mask is not True:
            mask = mask | self.ready[block]
        self.ready[block] = True if mask is True or mask.all() else mask

    def _guarded(self, instruction: Instruction, mask: Mask) -> NDArray[np.bool_]:
        lanes = np.broadcast_to(mask, self.machine.num_lanes)
        if instruction.guard is None:
            return lanes
        guard = self.batch.builder.register(instruction.guard)
        return lanes & (~guard if instruction.negated else guard)

    def _branch(self, branch: Instruction, index: int, mask: Mask) -> None:
        target = self.kernel.labels[branch.operands[0]]
        if branch.guard is None:
            self._go(target, mask)
            return
        taken = self._guarded(branch, mask)
        staying = np.broadcast_to(mask, len(taken)) & ~taken
        if taken.any():
            self._go(target, taken)
        if staying.any():
            self._go(index + 1, staying)

    def _wait(self, barrier: Instruction, index: int, mask: Mask) -> None:
        if len(barrier.operands) != 1:
            raise Fault(f"{barrier}: barriers of some threads only are not emulated")
        self.resume_at[np.broadcast_to(mask, len(self.live))] = index + 1
        self._release()

    def _release(self) -> None:
        """Let the CTAs go on whose live threads all wait at a barrier."""
        waiting = self.resume_at >= 0
        arrived: Lanes = np.all((waiting | ~self.live).reshape(self.machine.ctas, -1), axis=1)
        arrived = arrived & np.any(waiting.reshape(self.machine.ctas, -1), axis=1)
        self.counts.barriers += int(arrived.sum())
        for detector in self.machine.detectors():
            detector.cta_barrier(arrived)
        released = np.repeat(arrived, self.kernel.threads) & waiting
        for block in np.unique(self.resume_at[released]):
            self._go(int(block), released & (self.resume_at == block))
        self.resume_at[released] = -1

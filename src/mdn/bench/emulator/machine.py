"""The emulated machine: lanes of several CTAs side by side, their registers, global and shared memory.

Every register is one array over all lanes, so an instruction is one numpy call. A mask selects active lanes: ``True``
for all of them, else a boolean array. Memory is bytes; every access is checked for range and alignment. Fresh shared
memory, and bytes of an asynchronous copy that has not been waited for, hold NaN.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mdn.bench.emulator.exhaustive import DETECTORS
from mdn.bench.emulator.races import Check, GlobalRaceDetector, RaceDetector

Lanes = NDArray[Any]  # one value per lane
Mask = NDArray[np.bool_] | Literal[True]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FIRST_ADDRESS = 1 << 40  # of emulated global memory; small numbers are then never valid addresses
GUARD = 512  # unmapped bytes around every buffer
SECTOR = 32  # bytes of a global-memory transaction
BANKS = 32  # of shared memory, 4 bytes wide


class Fault(Exception):
    """The program did something that a GPU would trap on, or that PTX leaves undefined."""


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def active(mask: Mask, every_lane: Lanes) -> Lanes:
    """Indices of the active lanes."""
    return every_lane if mask is True else np.flatnonzero(mask)


@dataclass
class HostBuffer:
    """Bytes of a tensor's storage, and the parts of it that tensors given to the kernel cover."""

    address: int
    data: NDArray[np.uint8]
    spans: list[tuple[int, int]]  # (first, end) in bytes


class GlobalMemory:
    """One byte array that holds copies of all buffers, with unmapped bytes around each."""

    def __init__(self, buffers: list[HostBuffer]):
        self.buffers: list[tuple[HostBuffer, int]] = []
        size = GUARD
        for buffer in buffers:
            self.buffers.append((buffer, size))
            size += -(-len(buffer.data) // GUARD) * GUARD + GUARD
        self.bytes = np.zeros(size, np.uint8)
        self.mapped = np.zeros(size, bool)
        # (kind, source line) -> which sectors, if they are counted
        self.touched: dict[tuple[str, str], NDArray[np.bool_]] = defaultdict(lambda: np.zeros(size // SECTOR, bool))
        for buffer, offset in self.buffers:
            self.bytes[offset : offset + len(buffer.data)] = buffer.data
            for first, end in buffer.spans:
                self.mapped[offset + first : offset + end] = True

    def device_address(self, host_address: int) -> int:
        for buffer, offset in self.buffers:
            if buffer.address <= host_address <= buffer.address + len(buffer.data):
                return FIRST_ADDRESS + offset + host_address - buffer.address
        raise KeyError(f"no buffer at {host_address:#x}")

    def copy_back(self) -> None:
        for buffer, offset in self.buffers:
            buffer.data[:] = self.bytes[offset : offset + len(buffer.data)]


@dataclass
class Copy:
    """Bytes on their way from global to shared memory (cp.async)."""

    lanes: Lanes
    offsets: Lanes  # in the shared memory of all CTAs
    data: NDArray[np.uint8]  # [lanes, width]
    where: str

    def part(self, chosen: NDArray[np.bool_]) -> Copy:
        return Copy(self.lanes[chosen], self.offsets[chosen], self.data[chosen], self.where)


class Machine:
    """A batch of CTAs that run together."""

    def __init__(self, threads: int, ctas: int, shared_bytes: int, check: Check, count: bool):
        self.threads, self.ctas, self.shared_bytes = threads, ctas, shared_bytes
        self.check, self.count = check, count
        self.num_lanes = threads * ctas
        self.every_lane = np.arange(self.num_lanes)
        self.lane_in_warp = self.every_lane % 32
        self.cta_stride = max(1024, -(-shared_bytes // 1024) * 1024)
        self.cta_start = self.every_lane // threads * self.cta_stride
        self.counters: dict[str, Counter[str]] = defaultdict(Counter)  # place and opcode -> what -> times

    def start(self, memory: GlobalMemory, global_races: GlobalRaceDetector | None = None) -> None:
        """Fresh CTAs: shared memory of NaN, nothing in flight."""
        self.memory, self.global_races = memory, global_races
        self.shared = np.full(self.cta_stride * self.ctas, 0xFF, np.uint8)
        self.races = DETECTORS[self.check][0](self.threads, self.ctas, len(self.shared)) if self.check else None
        self._open_copies: list[Copy] = []
        self._copy_groups: list[
            tuple[NDArray[np.bool_], list[Copy]]
        ] = []  # (lanes that committed, pieces), oldest first

    def detectors(self) -> list[RaceDetector]:
        """Of shared and of global memory, if races are looked for."""
        return [detector for detector in (self.races, self.global_races) if detector is not None]

    # ---------------------------------------------------------------- addresses

    def global_offsets(self, addresses: Lanes, lanes: Lanes, width: int, where: str, kind: str) -> Lanes:
        """Offsets into ``memory.bytes`` for an access of ``width`` bytes per lane."""
        offsets = addresses[lanes].astype(np.int64) - FIRST_ADDRESS
        if offsets.size == 0:
            return offsets
        if offsets.min() < 0 or offsets.max() + width > len(self.memory.bytes):
            raise Fault(f"{where}: global address out of range")
        if (offsets % width).any():
            raise Fault(f"{where}: misaligned global access of {width} bytes")
        if not (self.memory.mapped[offsets].all() and self.memory.mapped[offsets + width - 1].all()):
            raise Fault(f"{where}: global access outside every tensor")
        if self.count:
            self._count_sectors(offsets, lanes, where, kind)
        return offsets

    def shared_offsets(self, addresses: Lanes, lanes: Lanes, width: int, where: str, kind: str) -> Lanes:
        """Offsets into ``shared`` of all CTAs."""
        offsets = addresses[lanes].astype(np.int64)
        if offsets.size == 0:
            return offsets
        if offsets.min() < 0 or offsets.max() + width > self.shared_bytes:
            raise Fault(f"{where}: shared address {offsets.max()} + {width} outside of {self.shared_bytes} bytes")
        if (offsets % width).any():
            raise Fault(f"{where}: misaligned shared access of {width} bytes")
        if self.count:
            self._count_wavefronts(offsets, lanes, width, where, kind)
        return offsets + self.cta_start[lanes]

    def _count_sectors(self, offsets: Lanes, lanes: Lanes, where: str, kind: str) -> None:
        """A warp's access moves each 32-byte sector once. No access is wider than 16 bytes, so none spans two."""
        sectors = offsets // SECTOR
        line = where.split()[0]
        self.memory.touched[kind, line][sectors] = True
        distinct_in_warp = np.unique(lanes // 32 * (len(self.memory.bytes) // SECTOR) + sectors)
        self.counters[where][f"global {kind} sectors"] += len(distinct_in_warp)

    def _count_wavefronts(self, offsets: Lanes, lanes: Lanes, width: int, where: str, kind: str) -> None:
        """128 bytes per pass: a warp goes at once (4 bytes a lane), by halves (8) or quarters (16).

        Within a pass every bank serves one 4-byte word; lanes that read the same word share it.
        """
        words_per_lane = max(1, width // 4)
        passes = np.repeat(lanes // (32 // words_per_lane), words_per_lane)
        words = (offsets[:, None] // 4 + np.arange(words_per_lane)).ravel()
        distinct = np.unique(passes * (self.cta_stride // 4) + words)
        pass_of, index = np.unique(distinct // (self.cta_stride // 4), return_inverse=True)
        per_bank = np.bincount(index * BANKS + distinct % BANKS, minlength=len(pass_of) * BANKS).reshape(-1, BANKS)
        counter = self.counters[where]
        counter[f"shared {kind} wavefronts"] += int(per_bank.max(1).sum())
        counter[f"shared {kind} wavefronts without conflicts"] += len(pass_of)

    # ---------------------------------------------------------------- loads, stores and atomics

    def load(self, space: str, addresses: Lanes, registers: list[Lanes], mask: Mask, where: str) -> None:
        """Each lane reads as many values as there are registers, from consecutive addresses."""
        lanes, size = active(mask, self.every_lane), registers[0].itemsize
        source, offsets = self._access(space, addresses, lanes, size * len(registers), where, "load")
        detector = self.races if space == "shared" else self.global_races
        if detector:
            detector.read(offsets, lanes, size * len(registers), where)
        values = source.view(registers[0].dtype)
        for number, register in enumerate(registers):
            register[lanes] = values[offsets // size + number]

    def store(self, space: str, addresses: Lanes, values: list[Lanes], mask: Mask, where: str) -> None:
        lanes, size = active(mask, self.every_lane), values[0].itemsize
        target, offsets = self._access(space, addresses, lanes, size * len(values), where, "store")
        detector = self.races if space == "shared" else self.global_races
        if detector:
            detector.write(offsets, lanes, size * len(values), where)
        cells = target.view(values[0].dtype)
        for number, value in enumerate(values):
            cells[offsets // size + number] = value[lanes]

    def atomic(self, space: str, operation: Any, addresses: Lanes, value: Lanes, mask: Mask, where: str) -> Lanes:
        """Apply ``operation`` (a ufunc); returns the values before it, exact where lanes do not meet in one cell."""
        lanes, size = active(mask, self.every_lane), value.itemsize
        target, offsets = self._access(space, addresses, lanes, size, where, "store")
        cells, before = target.view(value.dtype), np.zeros_like(value)
        before[lanes] = cells[offsets // size]
        operation.at(cells, offsets // size, value[lanes])
        return before

    def _access(
        self, space: str, addresses: Lanes, lanes: Lanes, width: int, where: str, kind: str
    ) -> tuple[NDArray[np.uint8], Lanes]:
        if space == "shared":
            return self.shared, self.shared_offsets(addresses, lanes, width, where, kind)
        return self.memory.bytes, self.global_offsets(addresses, lanes, width, where, kind)

    # ---------------------------------------------------------------- asynchronous copies (cp.async)

    def copy_async(self, targets: Lanes, sources: Lanes, width: int, kept: Lanes, mask: Mask, where: str) -> None:
        """``width`` bytes per lane; only the first ``kept`` are read from global memory, the rest become zero."""
        lanes = active(mask, self.every_lane)
        offsets = self.shared_offsets(targets, lanes, width, where, "store")
        data = np.zeros((len(lanes), width), np.uint8)
        for size in np.unique(kept[lanes]):
            if size:
                some = kept[lanes] == size
                begin = self.global_offsets(sources, lanes[some], width, where, "load")
                data[some, :size] = self.memory.bytes[begin[:, None] + np.arange(size)]
                if self.global_races:
                    self.global_races.read(begin, lanes[some], width, where)
        if self.races:
            self.races.write(offsets, lanes, width, where, in_flight=True)
        self.shared[offsets[:, None] + np.arange(width)] = 0xFF  # NaN until the copy is waited for
        self._open_copies.append(Copy(lanes, offsets, data, where))

    def commit_copies(self, mask: Mask) -> None:
        """The copies that these lanes have begun since their last commit become a group."""
        lanes = np.ones(self.num_lanes, bool) if mask is True else mask.copy()
        mine = [copy.part(lanes[copy.lanes]) for copy in self._open_copies]
        self._open_copies = [copy.part(~lanes[copy.lanes]) for copy in self._open_copies if not lanes[copy.lanes].all()]
        self._copy_groups.append((lanes, mine))

    def wait_for_copies(self, pending: int, mask: Mask) -> None:
        """Land all but the newest ``pending`` groups of each waiting lane."""
        newer = np.zeros(self.num_lanes, np.int32)
        remaining = []
        for committed, copies in reversed(self._copy_groups):
            done = committed & (newer >= pending) & mask
            newer += committed
            for copy in copies:
                self._land(copy.part(done[copy.lanes]))
            if (committed & ~done).any():
                remaining.append((committed & ~done, [copy.part(~done[copy.lanes]) for copy in copies]))
        self._copy_groups = remaining[::-1]

    def _land(self, copy: Copy) -> None:
        if len(copy.lanes):
            width = copy.data.shape[1]
            self.shared[copy.offsets[:, None] + np.arange(width)] = copy.data
            if self.races:
                self.races.land(copy.offsets, copy.lanes, width)

    # ---------------------------------------------------------------- warps

    def require_whole_warps(self, mask: Mask, where: str) -> None:
        """Warp-wide instructions are undefined when only a part of a warp executes them."""
        if mask is not True:
            lanes = mask.reshape(-1, 32)
            if (lanes.any(1) != lanes.all(1)).any():
                raise Fault(f"{where}: only part of a warp executes a warp-wide instruction")

    def shuffle(self, mode: str, values: Lanes, b: Lanes, c: int, mask: Mask, where: str) -> tuple[Lanes, Lanes]:
        """shfl.sync: the value of another lane, and whether that lane is in range (PTX ISA, 9.7.9.6)."""
        self.require_whole_warps(mask, where)
        lane, b = self.lane_in_warp, b.astype(np.int64) & 31
        segment, clamp = c >> 8 & 31, c & 31
        largest, smallest = lane & segment | clamp & ~segment & 31, lane & segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": smallest | b & ~segment & 31}[mode]
        in_range = source >= largest if mode == "up" else source <= largest
        return values[self.every_lane - lane + np.where(in_range, source, lane)], in_range

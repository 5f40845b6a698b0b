"""Race detectors: they remember the last accesses of every granule and what has ordered threads since.

Two accesses to one granule by different threads, at least one of them a write, need a CTA barrier between them, or a
warp barrier (``bar.warp.sync``) if both threads are in one warp. What wgmma reads must also be followed by a proxy
fence of its writer, and stays in use until a barrier that follows ``wgmma.wait_group``. Bytes of a ``cp.async`` must
not be read before the wait.

Epochs count barriers: an access is ordered before another exactly if their epochs differ. So a missing barrier is
reported whatever order the emulator happened to run the warps in, with one limit: of the reads of a granule all warps
are kept, but only one thread (`exhaustive` keeps all). `RaceDetector` watches shared memory, `GlobalRaceDetector`
global memory, where nothing orders two CTAs of a launch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

GRANULE = 2  # bytes: the smallest element that Triton stores to shared memory
Array = NDArray[Any]
Check = bool | Literal["exhaustive"]
"""whether to look for races; exhaustively: also with the pairs of `exhaustive`, for tests of the detectors"""


class RaceDetector:
    def __init__(self, threads: int, ctas: int, shared_bytes: int):
        self.threads, lanes, granules = threads, threads * ctas, shared_bytes // GRANULE
        self.found: Counter[str] = Counter()  # description -> times
        self.cta_epoch = np.ones(ctas, np.int32)  # epoch 0 is before everything
        self.warp_epoch = np.ones(lanes // 32, np.int32)
        self.fences = np.zeros(lanes, np.int32)  # proxy fences that each thread has executed
        # Last write: by whom and when. Last reads: the warps of the CTA epoch, and one thread of the warp epoch.
        self.writer, self.write_fences = np.zeros(granules, np.int32), np.zeros(granules, np.int32)
        self.write_epoch, self.write_warp_epoch = np.zeros(granules, np.int32), np.zeros(granules, np.int32)
        self.reader, self.read_warps = np.zeros(granules, np.int32), np.zeros(granules, np.uint32)
        self.read_epoch, self.read_warp_epoch = np.zeros(granules, np.int32), np.zeros(granules, np.int32)
        self.written, self.in_flight = np.zeros(granules, bool), np.zeros(granules, bool)
        self.used_by_wgmma = np.zeros(granules, np.int16)

    # ---------------------------------------------------------------- what orders accesses

    def cta_barrier(self, arrived: Array) -> None:
        """``arrived`` [ctas]: whose threads have all reached the barrier."""
        self.cta_epoch[arrived] += 1
        self.warp_epoch += np.repeat(arrived, self.threads // 32)

    def warp_barrier(self, warps: Array) -> None:
        self.warp_epoch += warps

    def proxy_fence(self, lanes: Array) -> None:
        self.fences[lanes] += 1

    # ---------------------------------------------------------------- accesses

    def read(self, offsets: Array, lanes: Array, width: int, where: str) -> None:
        at, lanes = self._granules(offsets, lanes, width)
        epoch, warp_epoch, warp = self._now(lanes)
        self._check_data(at, where)
        recent = self.write_epoch[at] == epoch
        same_warp = self.writer[at] // 32 == lanes // 32
        self.report(recent & ~same_warp, "read after write without a barrier", where)
        unordered = recent & same_warp & (self.writer[at] != lanes) & (self.write_warp_epoch[at] == warp_epoch)
        self.report(unordered, "read after write in a warp without bar.warp.sync", where)
        self._remember_read(at, lanes, epoch, warp_epoch, np.uint32(1) << warp)

    def read_by_wgmma(self, offsets: Array, group: int, width: int, where: str) -> Array:
        """Four warps read together through the asynchronous proxy. Returns the granules, in use until ``release``."""
        at, lanes = self._granules(offsets, np.full(len(offsets), group * 128), width)
        epoch, warp_epoch, warp = self._now(lanes)
        self._check_data(at, where)
        self.report(self.write_epoch[at] == epoch, "wgmma reads what was written without a barrier since", where)
        unfenced = self.fences[self.writer[at]] <= self.write_fences[at]
        self.report(unfenced, "wgmma reads what no proxy fence has followed", where)
        self._remember_read(at, lanes, epoch, warp_epoch, np.uint32(15) << warp)
        at = np.unique(at)
        self.used_by_wgmma[at] += 1
        return at

    def release(self, granules: Array, group: int) -> None:
        """The warp group has waited for its product. Each warp waits for itself, so that the bytes are free only after
        a barrier: they count as read now."""
        self.used_by_wgmma[granules] -= 1
        lanes = np.full(len(granules), group * 128)
        epoch, warp_epoch, warp = self._now(lanes)
        self._remember_read(granules, lanes, epoch, warp_epoch, np.uint32(15) << warp)

    def write(self, offsets: Array, lanes: Array, width: int, where: str, in_flight: bool = False) -> None:
        at, lanes = self._granules(offsets, lanes, width)
        epoch, warp_epoch, warp = self._now(lanes)
        self.report(self.in_flight[at], "write to bytes of a copy in flight", where)
        self.report(self.used_by_wgmma[at] > 0, "write to bytes that a wgmma in flight reads", where)
        recent = self.write_epoch[at] == epoch
        other_warp = self.writer[at] // 32 != lanes // 32
        self.report(recent & other_warp, "write after write without a barrier", where)
        unordered = recent & ~other_warp & (self.writer[at] != lanes) & (self.write_warp_epoch[at] == warp_epoch)
        self.report(unordered, "write after write in a warp without bar.warp.sync", where)
        read_recently = self.read_epoch[at] == epoch
        others = self.read_warps[at] & ~(np.uint32(1) << warp)
        self.report(read_recently & (others != 0), "write after read without a barrier", where)
        same_warp = (self.reader[at] // 32 == lanes // 32) & (self.reader[at] != lanes)
        unordered = read_recently & same_warp & (self.read_warp_epoch[at] == warp_epoch)
        self.report(unordered, "write after read in a warp without bar.warp.sync", where)
        self._remember_write(at, lanes, epoch, warp_epoch, in_flight)

    def land(self, offsets: Array, lanes: Array, width: int) -> None:
        """A copy has been waited for: its bytes count as written now, by the thread that waited."""
        at, lanes = self._granules(offsets, lanes, width)
        epoch, warp_epoch, _ = self._now(lanes)
        self._remember_write(at, lanes, epoch, warp_epoch, in_flight=False)

    def finish(self) -> None:
        """All threads have returned."""

    # ---------------------------------------------------------------- helpers

    @staticmethod
    def _granules(offsets: Array, lanes: Array, width: int) -> tuple[Array, Array]:
        steps = np.arange(0, max(width, GRANULE), GRANULE)
        return ((offsets[:, None] + steps) // GRANULE).ravel(), np.repeat(lanes, len(steps))

    def _now(self, lanes: Array) -> tuple[Array, Array, Array]:
        """Epochs of the lanes' CTAs and warps, and the number of each lane's warp inside its CTA."""
        warp = (lanes % self.threads // 32).astype(np.uint32)
        return self.cta_epoch[lanes // self.threads], self.warp_epoch[lanes // 32], warp

    def _check_data(self, at: Array, where: str) -> None:
        self.report(~self.written[at] & ~self.in_flight[at], "read of bytes that were never written", where)
        self.report(self.in_flight[at], "read of bytes of a copy in flight", where)

    def _remember_read(self, at: Array, lanes: Array, epoch: Array, warp_epoch: Array, warps: Array) -> None:
        self.read_warps[at[self.read_epoch[at] != epoch]] = 0
        np.bitwise_or.at(self.read_warps, at, warps)
        self.reader[at], self.read_epoch[at], self.read_warp_epoch[at] = lanes, epoch, warp_epoch

    def _remember_write(self, at: Array, lanes: Array, epoch: Array, warp_epoch: Array, in_flight: bool) -> None:
        self.writer[at], self.write_epoch[at], self.write_warp_epoch[at] = lanes, epoch, warp_epoch
        self.write_fences[at] = self.fences[lanes]
        self.in_flight[at] = in_flight
        self.written[at] = True

    def report(self, bad: Array, what: str, where: str) -> None:
        if bad.any():
            self.found[f"{what}: {where}"] += 1


SEVERAL = -1


class GlobalRaceDetector(RaceDetector):
    """Global memory in one launch, whose CTAs may run in batches. Barriers order the threads of a CTA as they do in
    shared memory; two CTAs must not meet at all, except as readers."""

    def __init__(self, threads: int, ctas: int, size: int):
        super().__init__(threads, ctas, size)
        self.first_cta = 0  # of the batch that runs now
        self.reader_cta = np.zeros(size // GRANULE, np.int32)  # plus one; 0: no reader

    def cta_barrier(self, arrived: Array) -> None:
        ctas = np.zeros(len(self.cta_epoch), bool)
        ctas[self.first_cta : self.first_cta + len(arrived)] = arrived
        super().cta_barrier(ctas)

    def warp_barrier(self, warps: Array) -> None:
        first = self.first_cta * self.threads // 32
        self.warp_epoch[first : first + len(warps)] += warps

    def read(self, offsets: Array, lanes: Array, width: int, where: str) -> None:
        lanes = lanes + self.first_cta * self.threads
        at, each = self._granules(offsets, lanes, width)
        cta = each // self.threads
        self.report(self._written_by_others(at, cta), "read of what another program writes", where)
        before = self.reader_cta[at]
        self.reader_cta[at] = np.where((before == 0) | (before == cta + 1), cta + 1, SEVERAL)
        self.reader_cta[at[self.reader_cta[at] != cta + 1]] = SEVERAL  # several in this very instruction
        super().read(offsets, lanes, width, where)

    def _written_by_others(self, at: Array, cta: Array) -> Array:
        return self.written[at] & (self.writer[at] // self.threads != cta)

    def write(self, offsets: Array, lanes: Array, width: int, where: str, in_flight: bool = False) -> None:
        lanes = lanes + self.first_cta * self.threads
        at, each = self._granules(offsets, lanes, width)
        cta = each // self.threads
        readers, foreign = self.reader_cta[at], self._written_by_others(at, cta)
        self.report((readers != 0) & (readers != cta + 1), "write to what another program reads", where)
        super().write(offsets, lanes, width, where, in_flight)
        # Programs that run side by side may write in one instruction: the last one has left its number.
        foreign |= self._written_by_others(at, cta)
        self.report(foreign, "write to what another program writes", where)

    def _check_data(self, at: Array, where: str) -> None:
        """Global memory is whatever the caller left in it."""

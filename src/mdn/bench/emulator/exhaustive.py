"""The check of the race detectors: keeps every access between two barriers of a CTA and compares them pair by pair.

The detectors of `races` keep a summary of every granule: its last write, and of the reads which warps took part. The
ones here do the same work and, beside it, forget nothing until all threads of the CTA have met. A copy (``cp.async``)
takes from its instruction to the wait that lands it, a product (``wgmma``) from its instruction to the wait that
releases its operands; what is still in flight at a barrier is compared with the accesses behind it, too. Slow, and
only for tests: `EmulatedGPU(target, check="exhaustive")`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdn.bench.emulator.races import Array, Check, GlobalRaceDetector, RaceDetector

READ, WRITE, COPY, PRODUCT = range(4)
NAMES = ("read", "write", "copy", "wgmma")
UNFINISHED = np.iinfo(np.int32).max
UNORDERED = "unordered"
"""how reports of this check begin"""

# One access of one lane to one granule. Times count instructions of the launch, so those of one instruction are equal.
ACCESS = np.dtype(
    [(name, np.int32) for name in ("granule", "lane", "kind", "begin", "end", "warp_begin", "warp_end", "place")]
)


class ExhaustiveDetector(RaceDetector):
    def __init__(self, threads: int, ctas: int, shared_bytes: int):
        super().__init__(threads, ctas, shared_bytes)
        self._clock = 0
        self._places: list[str] = []
        self._finished: list[NDArray[Any]] = []  # since the last barrier of each CTA
        self._copies: dict[int, NDArray[Any]] = {}  # in flight, by the time of their instruction
        self._copied_at = np.zeros_like(self.writer)  # time of the last copy to each granule
        self._products: list[list[NDArray[Any]]] = [[] for _ in range(threads * ctas // 128)]  # by warp group
        self._last_fence = np.zeros(threads * ctas, np.int32)  # of each lane
        self._last_write, self._last_writer = np.zeros_like(self.writer), np.zeros_like(self.writer)

    # ---------------------------------------------------------------- the log

    def read(self, offsets: Array, lanes: Array, width: int, where: str) -> None:
        super().read(offsets, lanes, width, where)
        self._finished.append(self._rows(READ, *self._granules(offsets, lanes, width), where))

    def write(self, offsets: Array, lanes: Array, width: int, where: str, in_flight: bool = False) -> None:
        super().write(offsets, lanes, width, where, in_flight)
        at, lanes = self._granules(offsets, lanes, width)
        if in_flight:
            rows = self._rows(COPY, at, lanes, where)
            self._copies[self._clock], self._copied_at[at] = rows, self._clock
        else:
            self._finished.append(self._rows(WRITE, at, lanes, where))
            self._last_write[at], self._last_writer[at] = self._clock, lanes

    def land(self, offsets: Array, lanes: Array, width: int) -> None:
        super().land(offsets, lanes, width)
        at, lanes = self._granules(offsets, lanes, width)
        for time in np.unique(self._copied_at[at]).tolist():
            rows = self._copies.pop(time, np.zeros(0, ACCESS))
            landed = np.isin(rows["granule"], at) & np.isin(rows["lane"], lanes)
            self._finish(rows[landed])
            if not landed.all():
                self._copies[time] = rows[~landed]
        self._last_write[at], self._last_writer[at] = self._clock, lanes

    def read_by_wgmma(self, offsets: Array, group: int, width: int, where: str) -> Array:
        granules = super().read_by_wgmma(offsets, group, width, where)
        # Whoever wrote last must have let the asynchronous proxy see it since then.
        unfenced = self._last_fence[self._last_writer[granules]] <= self._last_write[granules]
        self.report(unfenced & (self._last_write[granules] > 0), f"{UNORDERED}: a write and a wgmma, no fence", where)
        rows = self._rows(PRODUCT, granules, np.full(len(granules), group * 128), where)
        self._products[group].append(rows)
        return granules

    def release(self, granules: Array, group: int) -> None:
        super().release(granules, group)
        self._finish(self._products[group].pop(0))  # they are released in the order in which they began

    def proxy_fence(self, lanes: Array) -> None:
        super().proxy_fence(lanes)
        self._clock += 1
        self._last_fence[lanes] = self._clock

    def _rows(self, kind: int, at: Array, lanes: Array, where: str) -> NDArray[Any]:
        self._clock += 1
        self._places.append(where)
        rows = np.zeros(len(at), ACCESS)
        rows["granule"], rows["lane"], rows["kind"], rows["begin"] = at, lanes, kind, self._clock
        rows["warp_begin"], rows["place"] = self.warp_epoch[lanes // 32], len(self._places) - 1
        unfinished = kind in (COPY, PRODUCT)
        rows["end"] = UNFINISHED if unfinished else self._clock
        rows["warp_end"] = UNFINISHED if unfinished else rows["warp_begin"]
        return rows

    def _finish(self, rows: NDArray[Any]) -> None:
        """These accesses have been in flight and are now waited for."""
        self._clock += 1
        rows["end"], rows["warp_end"] = self._clock, self.warp_epoch[rows["lane"] // 32]
        self._finished.append(rows)

    # ---------------------------------------------------------------- the comparison

    def cta_barrier(self, arrived: Array) -> None:
        if arrived.any():
            self._compare(arrived)
        super().cta_barrier(arrived)

    def finish(self) -> None:
        super().finish()
        self._compare(np.ones(len(self.cta_epoch), bool))

    def _compare(self, arrived: Array) -> None:
        """All pairs since the last barrier of these CTAs. What has been waited for is then forgotten."""
        finished = np.concatenate([np.zeros(0, ACCESS), *self._finished])
        done = arrived[finished["lane"] // self.threads]
        self._finished = [finished[~done]]
        in_flight = np.concatenate([np.zeros(0, ACCESS), *self._copies.values(), *chain(*self._products)])
        in_flight = in_flight[arrived[in_flight["lane"] // self.threads]]
        rows = _sharing_a_granule(np.concatenate([finished[done], in_flight]), self.threads, len(arrived))
        for distance in range(1, len(rows)):
            first, second = rows[:-distance], rows[distance:]
            together = _cells(first, self.threads, len(arrived)) == _cells(second, self.threads, len(arrived))
            if not together.any():
                return
            bad = together & unordered(first, second)
            if bad.any():  # one pair is enough: a missing barrier makes thousands
                a, b = first[bad][0], second[bad][0]
                names = (f"{NAMES[x['kind']]} ({self._places[x['place']]})" for x in (a, b))
                self.found[f"{UNORDERED}: {' and '.join(names)}"] += 1
                return


def _cells(rows: NDArray[Any], threads: int, ctas: int) -> NDArray[np.int64]:
    """A number for every granule and CTA: what two CTAs do in global memory, no barrier orders."""
    return rows["granule"] * np.int64(ctas) + rows["lane"] // threads


def _sharing_a_granule(rows: NDArray[Any], threads: int, ctas: int) -> NDArray[Any]:
    """Sorted by granule, without those granules that nothing writes or that one lane alone uses."""
    cells = _cells(rows, threads, ctas)
    order = np.argsort(cells, kind="stable")
    rows, cells = rows[order], cells[order]
    if not len(rows):
        return rows
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    written = np.logical_or.reduceat(_writes(rows), starts)
    lanes = np.minimum.reduceat(rows["lane"], starts) != np.maximum.reduceat(rows["lane"], starts)
    in_flight = np.logical_or.reduceat(rows["kind"] >= COPY, starts)
    return rows[np.repeat(written & (lanes | in_flight), np.diff(starts, append=len(rows)))]


def _writes(rows: NDArray[Any]) -> Array:
    return (rows["kind"] == WRITE) | (rows["kind"] == COPY)


def unordered(a: NDArray[Any], b: NDArray[Any]) -> Array:
    """Pairs of accesses to a granule between the same two barriers of a CTA, one of them a write, that may happen in
    any order. One lane keeps its own order, except while a copy is in flight; lanes of a warp meet at
    ``bar.warp.sync``. A product is an access of four warps, which only the whole CTA can order. Copies of one value,
    stored by one instruction, are no conflict."""
    same_lane, same_warp = a["lane"] == b["lane"], a["lane"] // 32 == b["lane"] // 32
    in_order = same_lane & ((a["end"] < b["begin"]) | (b["end"] < a["begin"]))
    in_order |= same_warp & ((a["warp_end"] < b["warp_begin"]) | (b["warp_end"] < a["warp_begin"]))
    in_order &= (a["kind"] != PRODUCT) & (b["kind"] != PRODUCT)
    return (_writes(a) | _writes(b)) & (a["begin"] != b["begin"]) & ~in_order


class ExhaustiveGlobalDetector(GlobalRaceDetector, ExhaustiveDetector):
    pass


DETECTORS: dict[Check, tuple[type[RaceDetector], type[GlobalRaceDetector]]] = {
    True: (RaceDetector, GlobalRaceDetector),
    "exhaustive": (ExhaustiveDetector, ExhaustiveGlobalDetector),
}
"""of shared and of global memory"""

"""Barriers, waits and fences are removed from our compiled kernels one at a time: each removal must be noticed.

Either a race detector reports it, or NaN shows in the results: that is what bytes that have not arrived and products
that have not been waited for hold. Any other removal must be redundant: an exhaustive check that keeps every access and
compares all pairs (``Exhaustive``) finds no conflict either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from mdn.bench.emulator import EmulatedGPU
from mdn.bench.emulator.races import GRANULE, GlobalRaceDetector, RaceDetector
from mdn.ops import chunk_momentum_delta_rule

pytest.importorskip("triton")

SYNCHRONISATION = {
    "CTA barrier": r"^\s*bar\.sync\s.*;$",
    "warp barrier": r"^\s*bar\.warp\.sync\s.*;$",
    "wait for copies": r"^\s*cp\.async\.wait_group\s.*;$",
    "proxy fence": r"^\s*fence\.proxy\.async.*;$",
    "wait for wgmma": r"^\s*wgmma\.wait_group\.sync\.aligned\s.*;$",
}


def run_forward(gpu: EmulatedGPU) -> torch.Tensor:
    """Two rows; a key of the second one is NaN, so that the code for such tokens is executed, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 100, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    gates = [-torch.rand(2, 100, 1) for _ in range(2)]
    steps = {name: torch.rand(2, 100, 1) for name in ("beta", "eta")}
    k[1, 30] = torch.nan
    with gpu.emulate(), torch.no_grad():
        return chunk_momentum_delta_rule(q, k, v, *gates, **steps, backend="triton").o


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def places(target: str) -> list[tuple[str, str, int]]:
    """(kernel, what, line of the PTX) of every instruction that can be removed."""
    found: list[tuple[str, str, int]] = []

    def note(name: str, text: str) -> str:
        for number, line in enumerate(text.splitlines()):
            found.extend((name, what, number) for what, pattern in SYNCHRONISATION.items() if re.match(pattern, line))
        return text

    run_forward(EmulatedGPU(target, edit=note))
    return found


def without(kernel: str, number: int):
    """Removes one line; a wait for copies is weakened by one group instead, as a wrong pipeline depth would do."""

    def edit(name: str, text: str) -> str:
        if name != kernel:
            return text
        lines = text.splitlines()
        wait = re.match(r"(\s*cp\.async\.wait_group\s+)(\w+);", lines[number])
        lines[number] = f"{wait[1]}{int(wait[2], 0) + 1};" if wait else ""
        return "\n".join(lines)

    return edit


class Exhaustive:
    """Keeps all accesses to a granule between two barriers, and compares them pair by pair."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.accesses = defaultdict(
            set
        )  # (granule, CTA, CTA epoch) -> {(lane, warp epoch, instruction that writes or 0)}
        self.instructions = 0

    def _log(self, offsets, lanes, width, writes: bool) -> None:
        self.instructions += 1
        lanes = lanes + getattr(self, "first_cta", 0) * self.threads
        for offset, lane in zip(offsets.tolist(), lanes.tolist()):
            cta = lane // self.threads
            access = lane, int(self.warp_epoch[lane // 32]), writes * self.instructions
            for granule in range(offset // GRANULE, (offset + width - 1) // GRANULE + 1):
                self.accesses[granule, cta, int(self.cta_epoch[cta])].add(access)

    def read(self, offsets, lanes, width, where):
        self._log(offsets, lanes, width, writes=False)
        super().read(offsets, lanes, width, where)

    def write(self, offsets, lanes, width, where, in_flight=False):
        self._log(offsets, lanes, width, writes=True)
        super().write(offsets, lanes, width, where, in_flight)

    def conflicts(self) -> bool:
        return any(_conflict(a, b) for seen in self.accesses.values() for a in seen for b in seen if a < b)


def _conflict(a, b) -> bool:
    """Two accesses between the same two CTA barriers. Copies of one value, stored by one instruction, are none."""
    (lane, epoch, write), (other_lane, other_epoch, other_write) = a, b
    if lane == other_lane or not (write or other_write) or write == other_write:
        return False
    return lane // 32 != other_lane // 32 or epoch == other_epoch


class ExhaustiveShared(Exhaustive, RaceDetector):
    pass


class ExhaustiveGlobal(Exhaustive, GlobalRaceDetector):
    pass


def conflicts_exhaustively(target: str, edit=None) -> bool:
    made = []

    def remember(kind):
        def make(*arguments):
            made.append(kind(*arguments))
            return made[-1]

        return make

    with ExitStack() as stack:
        stack.enter_context(mock.patch("mdn.bench.emulator.machine.RaceDetector", remember(ExhaustiveShared)))
        stack.enter_context(mock.patch("mdn.bench.emulator.execute.GlobalRaceDetector", remember(ExhaustiveGlobal)))
        run_forward(EmulatedGPU(target, check=True, edit=edit))
    return any(detector.conflicts() for detector in made)


def check_mutants(target: str, every: int) -> None:
    right = run_forward(gpu := EmulatedGPU(target, check=True))
    assert not gpu.races
    mutants = places(target)
    assert {"CTA barrier", "wait for copies"} <= {what for _, what, _ in mutants}
    unnoticed = []
    for kernel, what, number in mutants[::every]:
        o = run_forward(gpu := EmulatedGPU(target, check=True, edit=without(kernel, number)))
        if not gpu.races and same(o, right):
            unnoticed.append((kernel, what, number))
    for kernel, what, number in unnoticed:
        assert not conflicts_exhaustively(target, without(kernel, number)), (kernel, what, number)
    print(f"{target}: {len(mutants[::every])} removals, of which redundant: {unnoticed}")
    assert len(unnoticed) <= 0.1 * len(mutants)


def test_some_removed_barriers_are_noticed():
    check_mutants("sm_80", every=12)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_removed_barrier_wait_or_fence_is_noticed_or_redundant(target):
    check_mutants(target, every=1)

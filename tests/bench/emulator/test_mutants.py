"""Barriers, waits and fences are removed from our compiled kernels one at a time: each removal must be reported.

A removal that the detector does not report is held against a second, exhaustive check that keeps every access and
compares all pairs (``all_conflicts``): only if that finds no conflict either is the instruction redundant.
"""

from __future__ import annotations

import re
from collections import defaultdict
from unittest import mock

import pytest
import torch

from mdn.bench.emulator import EmulatedGPU
from mdn.bench.emulator.races import GRANULE, RaceDetector
from mdn.ops import chunk_momentum_delta_rule

pytest.importorskip("triton")

SYNCHRONISATION = {
    "CTA barrier": r"^\s*bar\.sync\s.*;$",
    "warp barrier": r"^\s*bar\.warp\.sync\s.*;$",
    "wait for copies": r"^\s*cp\.async\.wait_group\s.*;$",
    "proxy fence": r"^\s*fence\.proxy\.async.*;$",
    "wait for wgmma": r"^\s*wgmma\.wait_group\.sync\.aligned\s.*;$",
}


def run_forward(gpu: EmulatedGPU) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 100, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    gates = [-torch.rand(1, 100, 1) for _ in range(2)]
    with gpu.emulate(), torch.no_grad():
        chunk_momentum_delta_rule(
            q, k, v, *gates, beta=torch.rand(1, 100, 1), eta=torch.rand(1, 100, 1), backend="triton"
        )


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


class ExhaustiveDetector(RaceDetector):
    """Keeps all accesses of a CTA epoch by granule and compares them pair by pair."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.accesses = defaultdict(set)  # (granule, CTA epoch) -> {(warp, is a write)}

    def _log(self, offsets, lanes, width, writes: bool) -> None:
        for offset, lane in zip(offsets.tolist(), lanes.tolist()):
            epoch = int(self.cta_epoch[lane // self.threads])
            for granule in range(offset // GRANULE, (offset + width - 1) // GRANULE + 1):
                self.accesses[granule, epoch].add((lane // 32, writes))

    def read(self, offsets, lanes, width, where):
        self._log(offsets, lanes, width, writes=False)
        super().read(offsets, lanes, width, where)

    def write(self, offsets, lanes, width, where, in_flight=False):
        self._log(offsets, lanes, width, writes=True)
        super().write(offsets, lanes, width, where, in_flight)

    def all_conflicts(self) -> bool:
        return any(len({warp for warp, _ in seen}) > 1 and any(w for _, w in seen) for seen in self.accesses.values())


def conflicts_exhaustively(target: str, edit) -> bool:
    made = []

    def make(*arguments):
        made.append(ExhaustiveDetector(*arguments))
        return made[-1]

    with mock.patch("mdn.bench.emulator.machine.RaceDetector", make):
        run_forward(EmulatedGPU(target, check=True, edit=edit))
    return any(detector.all_conflicts() for detector in made)


def check_mutants(target: str, every: int, exhaustively: bool) -> None:
    run_forward(gpu := EmulatedGPU(target, check=True))
    assert not gpu.races
    mutants = places(target)[::every]
    assert {"CTA barrier", "wait for copies"} <= {what for _, what, _ in places(target)}
    unreported = []
    for kernel, what, number in mutants:
        run_forward(gpu := EmulatedGPU(target, check=True, edit=without(kernel, number)))
        if not gpu.races:
            unreported.append((kernel, what, number))
    for kernel, what, number in unreported:
        if exhaustively and what == "CTA barrier":
            assert not conflicts_exhaustively(target, without(kernel, number)), (kernel, what, number)
    assert len(unreported) <= 0.2 * len(mutants), unreported


def test_some_removed_barriers_are_reported():
    check_mutants("sm_80", every=12, exhaustively=False)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_removed_barrier_wait_or_fence_is_reported_or_redundant(target):
    check_mutants(target, every=1, exhaustively=True)

"""The number of threads follows what other programs leave free; a number that the user chose is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mdn.common import hardware
from mdn.common.hardware import Threads


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "available_cores", lambda: 4)
    monkeypatch.setattr(Threads, "FIRST_LOOK", 0.0)
    yield
    torch.set_num_threads(before)


def clocks(monkeypatch: pytest.MonkeyPatch, *moments: tuple[float, float, float]) -> None:
    """What successive looks see: (wall, all work, own work) in seconds."""
    seen = iter(moments)
    monkeypatch.setattr(hardware._Clock, "read", staticmethod(lambda: hardware._Clock(*next(seen))))


@pytest.mark.parametrize(
    ("others", "expected"), [(0.0, 4), (0.2, 4), (0.7, 3), (1.0, 3), (2.0, 2), (3.5, 1), (4.0, 1), (9.0, 1)]
)
def test_threads_are_the_cores_that_other_programs_leave_free(
    others: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks(monkeypatch, (0.0, 0.0, 0.0), (10.0, 10 * others + 15.0, 15.0))
    told = Threads().adapt(now=True)
    assert torch.get_num_threads() == expected
    assert (told is None) == (expected == 4)
    if told is not None:
        assert f"other programs use {others:.1f} of 4 cores: training continues with {expected} thread" in told


def test_threads_come_back_when_the_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks(monkeypatch, (0.0, 0.0, 0.0), (10.0, 40.0, 0.0), (20.0, 50.0, 10.0))
    threads = Threads()
    assert threads.adapt(now=True) is not None
    assert torch.get_num_threads() == 1
    assert threads.adapt(now=True) is not None
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_from_the_environment_is_kept(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "4")
    clocks(monkeypatch)
    assert Threads().adapt(now=True) is None
    assert torch.get_num_threads() == 4


def test_a_number_from_the_recipe_is_set_kept_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks(monkeypatch)
    threads = Threads(2)
    assert threads.adapt(now=True) is None
    assert torch.get_num_threads() == 2
    threads.restore()
    assert torch.get_num_threads() == 4


def test_the_real_clock_counts_this_process_as_its_own() -> None:
    begin = hardware._Clock.read()
    while hardware._Clock.read().own - begin.own < 0.1:
        pass
    end = hardware._Clock.read()
    assert end.wall > begin.wall
    assert end.busy - begin.busy >= 0

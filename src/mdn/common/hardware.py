"""What the machine has to offer: cores, memory, and how many threads are worth using while other programs run.

OpenMP threads wait for each other at the end of every operation. One thread that shares its core with another program
therefore holds up all of them: two threads on two cores of which one is busy are slower than one thread
(docs/training.md has the figures). `Threads` watches the other programs and uses only cores that are free.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

try:
    import psutil
except ImportError:
    psutil = None


def available_cores() -> int:
    """Cores that this process may use: its affinity where the system has one, else all of the machine."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory() -> int | None:
    """Bytes of memory in the machine, if that can be known."""
    return int(psutil.virtual_memory().total) if psutil is not None else None


@dataclass(frozen=True)
class _Clock:
    """Seconds since some moment: wall time, all work on this process's cores, and this process's own work."""

    wall: float
    busy: float
    own: float

    @staticmethod
    def read() -> _Clock:
        cores = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            cores = [times for number, times in enumerate(cores) if number in os.sched_getaffinity(0)]
        # guest time is part of user time; stolen time went to another virtual machine, so it counts as busy
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in cores)
        total = sum(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) for times in cores)
        return _Clock(time.monotonic(), total - idle, time.process_time())


class Threads:
    """Keeps torch's number of threads at what is free beside other programs.

    `fixed` is a number that the user has chosen: it is set once and then left alone, as OMP_NUM_THREADS is.
    """

    PERIOD = 5.0  # seconds between two measurements
    FIRST_LOOK = 0.3

    def __init__(self, fixed: int | None = None, *, adapts: bool = True) -> None:
        self.before = torch.get_num_threads()
        if fixed is not None:
            torch.set_num_threads(fixed)
        self.most = torch.get_num_threads()
        chosen = fixed is not None or any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
        self.adapts = adapts and self.most > 1 and not chosen and psutil is not None
        if self.adapts:
            self._since = _Clock.read()
            time.sleep(self.FIRST_LOOK)

    def restore(self) -> None:
        torch.set_num_threads(self.before)

    def adapt(self, *, now: bool = False) -> str | None:
        """Measure again, at most once per PERIOD. Returns a sentence for the user if the number of threads changes."""
        if not self.adapts or not (now or time.monotonic() - self._since.wall >= self.PERIOD):
            return None
        before, self._since = self._since, _Clock.read()
        seconds = max(self._since.wall - before.wall, 1e-3)
        others = max((self._since.busy - before.busy) - (self._since.own - before.own), 0.0) / seconds
        cores = available_cores()
        threads = max(1, min(self.most, int(cores - others + 0.3)))  # 0.3: a mostly free core is worth a thread
        if threads == torch.get_num_threads():
            return None
        torch.set_num_threads(threads)
        return (
            f"other programs use {others:.1f} of {cores} cores: training continues with {threads} "
            f"thread{'s' if threads > 1 else ''} (training.threads or OMP_NUM_THREADS fix the number)"
        )

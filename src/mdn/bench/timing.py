"""Timing for comparisons: all peers in one process, interleaved, the minimum over several repeats.

The least time is the one with the fewest interruptions; with interleaving a slow phase of the machine affects all.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from tqdm import tqdm

Key = TypeVar("Key", bound=Hashable)


def interleaved(
    calls: dict[Key, Callable[[], object]],
    repeats: int = 7,
    budget_seconds: float = 20.0,
    label: str = "",
    untimed: int = 0,
) -> dict[Key, float]:
    """Least seconds per call of each, calling them in turn. Stops early when the budget is spent (two rounds at least).

    ``untimed``: calls before each one that is timed, where the processor's caches should hold what the call itself
    leaves there, and not what its neighbour does.
    """
    for call in calls.values():
        call()
    _wait_for_device()  # the first call that is timed must not wait for these
    least = dict.fromkeys(calls, float("inf"))
    started = time.perf_counter()
    for done in tqdm(range(repeats), desc=label, leave=False, disable=not label):
        for name, call in calls.items():
            for _ in range(untimed):
                call()
                _wait_for_device()
            begin = time.perf_counter()
            call()
            _wait_for_device()
            least[name] = min(least[name], time.perf_counter() - begin)
        if done and time.perf_counter() - started > budget_seconds:
            break
    return least


def machine(device: str = "cpu") -> dict[str, object]:
    """What a figure depends on besides the code."""
    return {
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan"),  # Windows has none
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor() or platform.machine()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

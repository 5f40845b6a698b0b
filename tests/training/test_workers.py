"""Jobs over processes: results as they come, and an end that no job can put off."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from mdn.common.workers import completed, processes_from


def wait_stubbornly(seconds: float, begun: Path) -> tuple[float, int]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.touch()
    time.sleep(seconds)
    return seconds, torch.get_num_threads()


def test_leaving_early_ends_jobs_that_ignore_milder_signals(tmp_path: Path) -> None:
    results = completed(wait_stubbornly, [(0.0, tmp_path / "short"), (600.0, tmp_path / "long")], processes=2)
    assert next(results) == (0.0, 1)  # one thread each
    while not (tmp_path / "long").exists():
        time.sleep(0.1)
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 60


def test_the_number_of_processes_is_checked() -> None:
    assert processes_from(3) == 3
    assert processes_from(None) >= 1
    with pytest.raises(ValueError, match="--processes must be at least 1"):
        processes_from(0)

"""Jobs over processes: results as they come, and an end that no job can put off."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from mdn.common.workers import completed, processes_from


def wait_stubbornly(seconds: float, begun: Path) -> tuple[float, int]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.with_suffix(".pid").write_text(str(os.getpid()))
    begun.touch()
    time.sleep(seconds)
    return seconds, torch.get_num_threads()


@pytest.mark.timeout(300)  # far less than the job would take
def test_leaving_early_ends_jobs_that_ignore_sigterm(tmp_path: Path) -> None:
    results = completed(wait_stubbornly, [(0.0, tmp_path / "short"), (3600.0, tmp_path / "long")], processes=2)
    assert next(results) == (0.0, 1)  # one thread each
    while not (tmp_path / "long").exists():
        time.sleep(0.1)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "long.pid").read_text()), 0)


def test_the_number_of_processes_is_checked() -> None:
    assert processes_from(3) == 3
    assert processes_from(None) >= 1
    with pytest.raises(ValueError, match="--processes must be at least 1"):
        processes_from(0)

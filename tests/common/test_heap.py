"""Freed memory is kept: the next step does not fault it in again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from mdn.common.heap import keep_freed_memory
kept = keep_freed_memory()
faults = []
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 21) for _ in range(8)] + [torch.ones(1 << 24)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(faults[4:]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
@pytest.mark.parametrize("own_setting", [False, True])
def test_steps_reuse_their_memory(own_setting: bool) -> None:
    setting = {"MALLOC_TRIM_THRESHOLD_": "131072"} if own_setting else {}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env={**os.environ, **setting}, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    assert kept == str(not own_setting)
    if own_setting:
        assert int(faults) > 10_000  # 128 MiB in pages of 4 KiB
    else:
        assert int(faults) < 5_000  # the first steps may still find new places for their blocks

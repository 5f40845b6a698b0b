"""Starts training/ranks.py and reads what its ranks report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training_support import losses

SCRIPT = Path(__file__).parent / "training" / "ranks.py"


def run_jobs(root: Path, *jobs: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(root), *jobs]
    output = subprocess.run(command, env=environment, timeout=400, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr


def report(root: Path, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
    return json.loads((root / f"{name}-{ranks}-{rank}.json").read_text())


def numbers(root: Path, name: str) -> list[float]:
    return [float.fromhex(value) for value in losses(root / name)]

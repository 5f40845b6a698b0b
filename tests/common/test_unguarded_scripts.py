"""A script that calls us at its top level, without `if __name__ == "__main__"`, is told so instead of hanging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training_support import write_corpus

PREPARE = """
from pathlib import Path
from mdn.training.dataset import prepare_data
from training_support import tiny_recipe

def work():
    print("tokens", len(prepare_data(tiny_recipe(Path.cwd(), data={"workers": 2})).training))
"""
TRAIN = """
from pathlib import Path
from mdn.training.run import train
from training_support import tiny_recipe

def work():
    print("steps", train(tiny_recipe(Path.cwd(), data={"workers": 2}, training={"steps": 3})).steps)
"""
GRID = """
from dataclasses import dataclass
from pathlib import Path
from mdn.experiments.grid import run_grid

@dataclass(frozen=True)
class Cell:
    name: str
    def settings(self):
        return {"name": self.name}

def square(cell):
    return {"result": len(cell.name) ** 2}

def work():
    print("cells", len(run_grid([Cell("a"), Cell("bb")], square, Path("grid"), processes=2, label="squares")))
"""
PEAK = """
from mdn.bench.op_general import forms, peak_bytes
from mdn.bench.op_peers import RuleShape

def work():
    print("peak", peak_bytes(next(iter(forms())), RuleShape(1, 64, 1, 16, 16)))
"""
SCRIPTS = {"prepare": PREPARE, "train": TRAIN, "grid": GRID, "peak": PEAK}


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    write_corpus(folder / "corpus", documents=5, words=160_000)  # more than `SMALL_CORPUS`: processes are used
    (folder / "my_script.py").write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "my_script.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_a_guard_is_told_what_it_lacks(name: str, tmp_path: Path) -> None:
    result = run(SCRIPTS[name] + "\nwork()\n", tmp_path)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: worker processes import this script again")
    assert 'put what it does under `if __name__ == "__main__":`' in last
    assert result.stderr.count("Traceback") == 1, result.stderr  # only that of the script itself


def test_with_the_guard_it_runs(tmp_path: Path) -> None:
    result = run(GRID + '\nif __name__ == "__main__":\n    work()\n', tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "cells 2\n"

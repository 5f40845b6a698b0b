"""Every file in examples/ runs, in a short form, and prints what it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def run(script: Path, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_layer_trains_inside_a_hand_written_model(tmp_path):
    out = run(EXAMPLES / "layer_in_your_model.py", "--steps", "20", cwd=tmp_path)
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", out)]
    assert losses[-1] < losses[0] - 1


def test_packed_training_has_the_loss_of_separate_samples(tmp_path):
    out = run(EXAMPLES / "packed_training_with_trainer.py", "--steps", "2", cwd=tmp_path)
    packed, alone = map(float, re.search(r"packed (\d+\.\d+), one sample at a time (\d+\.\d+)", out).groups())
    assert packed == pytest.approx(alone, abs=5e-6)


def test_decoding_with_slots_agrees_with_the_definition(tmp_path):
    out = run(EXAMPLES / "decode_with_slots.py", cwd=tmp_path)
    errors = [float(value) for value in re.findall(r"error (\S+)", out)]
    assert len(errors) == 3
    assert max(errors) < 2e-6


def test_a_new_mixer_passes_the_checks_and_generates(tmp_path):
    out = run(EXAMPLES / "new_mixer.py", cwd=tmp_path)
    assert "without leaks" in out
    assert "tensor([[1, 2, 3," in out


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    cells = json.loads((EXAMPLES / "momentum.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    script.write_text(source)
    out = run(script, cwd=tmp_path)
    assert "largest absolute value" in out
    for picture in ("eigenvalues.png", "response.png"):
        assert (tmp_path / picture).stat().st_size > 10_000

"""Every file in examples/ runs, in a short form, and prints what it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
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
    assert re.search(r"tensor\(\[\[ *1, *2, *3, *\d+", out)


def train(recipe: str, *overrides: str, output: Path) -> str:
    """As printed in the recipe, from the root of the repository, but with few steps and another output."""
    command = [sys.executable, "-m", "mdn", "train", f"examples/{recipe}", f"output={output}", *overrides]
    environment = ENVIRONMENT | {"MDN_CACHE": str(output.parent / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_recipes_train_on_own_text_fine_tune_and_import_a_mixer(tmp_path):
    short = ("training.steps=3", "training.warmup_steps=1")
    train("own_text.yaml", *short, output=tmp_path / "own_text")
    source = tmp_path / "own_text"
    start = (f"model.init_from={source}", f"tokenizer.path={source}/model")
    train("fine_tune.yaml", *start, *short, output=tmp_path / "fine_tune")
    train("new_mixer.yaml", *short, output=tmp_path / "new_mixer")
    for run_folder in ("own_text", "fine_tune", "new_mixer"):
        assert (tmp_path / run_folder / "model" / "model.safetensors").exists()


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name in listed or path.is_dir() or path.name == "README.md", path


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    cells = json.loads((EXAMPLES / "momentum.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "notebook.py"
    script.write_text(source)
    out = run(script, cwd=tmp_path)
    assert "largest absolute value" in out
    for picture in ("eigenvalues.png", "response.png"):
        assert (tmp_path / picture).stat().st_size > 10_000

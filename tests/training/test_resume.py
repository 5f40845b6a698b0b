"""Interrupted runs: killed at any moment, stopped by a signal, damaged, foreign, out of disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdn.common import files
from mdn.training import checkpoints, run
from mdn.training.monitor import read_metrics
from mdn.training.run import train
from training_support import losses, tiny_recipe

SCRIPT = Path(__file__).with_name("interruptions.py")
RUNS = ("run", "killed")


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    """Drawing takes longer than training here; cli/test_demo.py looks at the plots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plot_loss", lambda *_: None)
        patch.setattr(run, "plot_gates", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and the undisturbed run `run`."""
    root = tmp_path_factory.mktemp("training")
    train(tiny_recipe(root))
    return root


@pytest.fixture(scope="module")
def interrupted(whole: Path) -> dict[str, Any]:
    """What happened to the children of training_interruptions.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(SCRIPT), str(whole)]
    output = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=400)
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout.splitlines()[-1])


def test_a_run_killed_inside_saves_and_at_random_moments_ends_with_the_same_losses_bit_for_bit(
    whole: Path, interrupted: dict[str, Any]
) -> None:
    kills = interrupted["kills"]
    planted = [(moment, status) for moment, status in kills if moment.startswith(("in_", "after_", "before_"))]
    assert len(planted) == 6
    assert all(os.WIFSIGNALED(status) for _, status in planted), kills  # every planted kill did strike
    assert kills[-1] == ["undisturbed", 0]
    assert losses(whole / "killed") == losses(whole / "run")
    for kind in ("gates", "held_out"):
        steps = [
            [line["step"] for line in read_metrics(whole / name / "metrics.jsonl") if kind in line] for name in RUNS
        ]
        assert steps[0] == steps[1], kind
    assert (whole / "killed" / "summary.json").is_file()


def test_two_runs_of_one_recipe_give_the_same_losses_and_weights(whole: Path) -> None:
    train(tiny_recipe(whole, "again"))
    assert losses(whole / "again") == losses(whole / "run")
    first, second = ((whole / name / "model" / "model.safetensors").read_bytes() for name in ("run", "again"))
    assert first == second


def test_another_seed_gives_other_losses(whole: Path) -> None:
    train(tiny_recipe(whole, "seeded", seed=1, training={"steps": 2}))
    assert losses(whole / "seeded") != losses(whole / "run")[:2]


def test_a_finished_run_is_reported_and_not_trained_again(whole: Path) -> None:
    before = (whole / "run" / "metrics.jsonl").stat().st_mtime_ns
    result = train(tiny_recipe(whole))
    assert result.summary is not None
    assert result.step == 12
    assert (whole / "run" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ctrl_c_and_sigterm_save_exit_zero_and_the_run_goes_on_exactly(
    whole: Path, interrupted: dict[str, Any], name: str
) -> None:
    status, output = interrupted["stops"][name]
    assert status == 0
    assert "stopped at step" in output
    [saved] = checkpoints.all_paths(whole / f"stopped-{name}")
    assert 2 <= checkpoints.step_of(saved) < 12
    train(tiny_recipe(whole, f"stopped-{name}"))
    assert losses(whole / f"stopped-{name}") == losses(whole / "run")


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", _flip_a_bit, "checkpoint-12 is damaged: the content of model.safetensors has changed"),
        ("optimizer.pt", _flip_a_bit, "checkpoint-12 is damaged: the content of optimizer.pt has changed"),
        ("model.safetensors", _cut, "checkpoint-12 is torn: model.safetensors has"),
        (checkpoints.MARKER, Path.unlink, "checkpoint-12 has no COMPLETE marker"),
        (checkpoints.MARKER, _cut, "checkpoint-12/COMPLETE cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_with_a_warning_and_the_whole_one_before_it_is_resumed_exactly(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    copy = _stopped_copy(whole, tmp_path)
    damage(copy / "checkpoint-12" / file)
    train(_copy_recipe(whole, tmp_path))
    warning = capsys.readouterr().err
    assert message in warning
    assert "set aside as damaged-checkpoint-12" in warning
    assert "checkpoint-9 (step 9)" in warning
    assert losses(copy) == losses(whole / "run")
    assert (copy / "damaged-checkpoint-12").is_dir()  # nothing is deleted
    first, second = (path / "model" / "model.safetensors" for path in (copy, whole / "run"))
    assert first.read_bytes() == second.read_bytes()


def test_an_older_damaged_checkpoint_does_not_matter(whole: Path, tmp_path: Path) -> None:
    copy = _stopped_copy(whole, tmp_path)
    (copy / "checkpoint-9" / checkpoints.MARKER).unlink()
    assert train(_copy_recipe(whole, tmp_path)).summary is not None


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(whole: Path, tmp_path: Path) -> None:
    copy = _stopped_copy(whole, tmp_path)
    for name in ("checkpoint-9", "checkpoint-12"):
        _flip_a_bit(copy / name / "model.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact: .*checkpoint-12 is damaged.*checkpoint-9 is"):
        train(_copy_recipe(whole, tmp_path))
    assert (copy / "checkpoint-12").is_dir()


def test_a_lengthened_run_with_a_constant_rate_is_the_longer_run_exactly(whole: Path, tmp_path: Path) -> None:
    settings = {"schedule": "constant", "warmup_steps": 1}
    long = tiny_recipe(tmp_path, "long", training={**settings, "steps": 10})
    train(long)
    train(tiny_recipe(tmp_path, "short", training={**settings, "steps": 4}))
    lengthened = tiny_recipe(tmp_path, "short", training={**settings, "steps": 10})
    assert train(lengthened).step == 10
    assert losses(tmp_path / "short") == losses(tmp_path / "long")
    first, second = (tmp_path / name / "model" / "model.safetensors" for name in ("short", "long"))
    assert first.read_bytes() == second.read_bytes()


def test_lengthening_a_cosine_says_that_the_rate_jumps_and_follows_the_new_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_recipe(tmp_path, "run", training={"steps": 4}))
    capsys.readouterr()
    train(tiny_recipe(tmp_path, "run", training={"steps": 8}))
    told = capsys.readouterr().err
    assert "lengthened from 4 to 8 steps: the learning rate follows the cosine schedule of 8 steps" in told
    train(tiny_recipe(tmp_path, "planned", training={"steps": 8}))
    rates = [
        [line["learning_rate"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("run", "planned")
    ]
    assert rates[0][4:] == rates[1][4:]
    assert rates[0][:4] != rates[1][:4]


def test_a_run_cannot_be_shortened(whole: Path) -> None:
    with pytest.raises(ValueError, match=r"can be lengthened but not shortened to training\.steps=5"):
        train(tiny_recipe(whole, training={"steps": 5}))


def test_a_checkpoint_of_another_recipe_is_refused_with_the_field_that_differs(whole: Path, tmp_path: Path) -> None:
    _stopped_copy(whole, tmp_path)
    recipe = _copy_recipe(whole, tmp_path, training={"learning_rate": 2e-2})
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match=r"checkpoint-12 comes from another recipe \(training.learning_rate was 0.01"):
        train(recipe)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


def test_a_run_may_go_on_with_another_micro_batch(whole: Path, tmp_path: Path) -> None:
    copy = _stopped_copy(whole, tmp_path)
    checkpoints.remove(copy / "checkpoint-12")
    train(_copy_recipe(whole, tmp_path, training={"micro_batch_tokens": 128}))
    after = [float.fromhex(value) for value in losses(copy)]
    expected = [float.fromhex(value) for value in losses(whole / "run")]
    assert after == pytest.approx(expected, abs=1e-5)


def test_two_processes_cannot_train_in_one_directory(whole: Path) -> None:
    with (whole / "run" / ".lock").open("a") as other:
        files._locks_of_this_process.pop((whole / "run" / ".lock").resolve()).close()
        fcntl.flock(other, fcntl.LOCK_EX)  # a second open file is to the system what another process would be
        with pytest.raises(ValueError, match="another process is training in"):
            train(tiny_recipe(whole))


def test_an_unwritable_directory_is_one_clear_error(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    recipe = tiny_recipe(whole, output=str(tmp_path / "file" / "run"))
    with pytest.raises(OSError, match="cannot be written"):
        train(recipe)


def test_a_full_disk_stops_with_one_line_and_keeps_the_last_good_checkpoint(
    whole: Path, interrupted: dict[str, Any]
) -> None:
    status, message = interrupted["disk_full"]
    assert status == 2
    assert "checkpoint-6 could not be written" in message
    assert "the last good checkpoint is checkpoint-3" in message
    assert [path.name for path in checkpoints.all_paths(whole / "full")] == ["checkpoint-3"]
    train(tiny_recipe(whole, "full"))
    assert losses(whole / "full") == losses(whole / "run")


def _stopped_copy(whole: Path, place: Path) -> Path:
    """A copy of the finished run without its summary, so that starting it again looks at its checkpoints."""
    shutil.copytree(whole / "run", place / "run", ignore=shutil.ignore_patterns("summary.json"))
    return place / "run"


def _copy_recipe(whole: Path, place: Path, **overrides):
    return tiny_recipe(whole, **overrides).model_copy(update={"output": str(place / "run")})


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),  # torch's words for it
    ],
)
def test_a_full_disk_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoints, "publish", fails)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OSError, match=r"checkpoint-3 could not be written in .*: the disk is full"):
        train(tiny_recipe(tmp_path))

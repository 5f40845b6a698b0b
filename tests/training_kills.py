"""Runs a training again and again in forked children that are killed at chosen and at random moments; see
test_training_resume.py. Forking after the imports makes a start cost milliseconds instead of seconds.

    python training_kills.py ROOT     prints one JSON object: every kill with the exit status of its child
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mdn.training import checkpoints, run, trainer
from training_support import tiny_recipe


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, action: Callable, original: Callable) -> Callable:
    """`original`, but its call number `number` does `action` first and then dies."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            action(*args, **kwargs)
            die()
        return original(*args, **kwargs)

    return wrapped


def half_a_file(_: object, path: str) -> None:
    """What a kill in the middle of torch.save leaves."""
    Path(path).write_bytes(b"\x00" * 1000)


def nothing(*args: object, **kwargs: object) -> None:
    pass


def in_the_optimizer_file() -> None:
    torch.save = at_call(2, half_a_file, torch.save)  # 1 is training_args.bin, 2 optimizer.pt


def after_the_weights() -> None:
    trainer.Trainer._save_optimizer_and_scheduler = at_call(1, nothing, trainer.Trainer._save_optimizer_and_scheduler)


def before_the_marker() -> None:
    checkpoints.write_atomically = at_call(1, nothing, checkpoints.write_atomically)


def before_the_rename() -> None:
    checkpoints.sync_directory = nothing
    checkpoints.os = type("os", (), {"replace": at_call(1, nothing, os.replace), "fsync": os.fsync})


def after_the_rename() -> None:
    checkpoints.sync_directory = at_call(1, nothing, nothing)


def in_the_rotation() -> None:
    def half_removed(path, **_: object) -> None:
        (Path(path) / "model.safetensors").unlink()

    original = shutil.rmtree

    def rmtree(path, **options):
        if "removing-" in str(path) and Path(path).exists():
            half_removed(path)
            die()
        original(path, **options)

    checkpoints.shutil = type("shutil", (), {"rmtree": staticmethod(rmtree)})


MOMENTS = [
    in_the_optimizer_file,
    after_the_weights,
    before_the_marker,
    before_the_rename,
    after_the_rename,
    in_the_rotation,
]


def run_child(root: Path, prepare: Callable[[], None] | None, seconds: float | None) -> int:
    """Train in a child that is killed by what `prepare` planted or after some seconds; its wait status."""
    child = os.fork()
    if child == 0:
        if prepare is not None:
            prepare()
        result = run.train(tiny_recipe(root, "killed"))
        os._exit(0 if result.summary is not None else 3)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main(root: Path) -> None:
    torch.set_num_threads(1)
    run.plot_loss = run.plot_gates = nothing  # drawing takes longer than training here
    history: list[tuple[str, int]] = []
    for moment in MOMENTS:
        history.append((moment.__name__, run_child(root, moment, None)))
    generator = random.Random(1)
    for _ in range(4):
        seconds = generator.uniform(0.05, 1.5)
        history.append((f"after {seconds:.2f} s", run_child(root, None, seconds)))
    history.append(("undisturbed", run_child(root, None, None)))
    print(json.dumps(history))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

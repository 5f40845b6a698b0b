"""Runs trainings in forked children that are killed, stopped or cut off from the disk; see test_resume.py.
Forking after the imports makes a start cost milliseconds instead of seconds.

    PYTHONPATH=tests python tests/training/interruptions.py ROOT   prints JSON: what happened to every child
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mdn import cli
from mdn.training import checkpoints, run, trainer
from mdn.training.monitor import read_metrics
from mdn.training.recipe import to_yaml
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


def fork(work: Callable[[], int]) -> int:
    """Run `work` in a child; its process id."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    return child


def killed(root: Path, prepare: Callable[[], None] | None, seconds: float | None) -> int:
    """Train in a child that is killed by what `prepare` planted or after some seconds; its wait status."""

    def work() -> int:
        if prepare is not None:
            prepare()
        return 0 if run.train(tiny_recipe(root, "killed")).summary is not None else 3

    child = fork(work)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def stopped(root: Path, number: signal.Signals) -> tuple[int, str]:
    """`mdn train` in a child that gets a signal after its second step: exit code and what it printed."""
    name = f"stopped-{number.name}"
    recipe = root / f"{name}.yaml"
    recipe.write_text(to_yaml(tiny_recipe(root, name, logging={"save_every": 0})))

    def work() -> int:
        with (root / f"{name}.out").open("w") as output:
            os.dup2(output.fileno(), 1)
            status = cli.main(["train", str(recipe)])
            sys.stdout.flush()
        return status

    child = fork(work)
    metrics = root / name / "metrics.jsonl"
    while not any(line["step"] >= 2 for line in read_metrics(metrics)):
        time.sleep(0.005)
    os.kill(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, (root / f"{name}.out").read_text()


def disk_full(root: Path) -> tuple[int, str]:
    """A limit on the size of files makes every checkpoint after the first fail half way, as a full disk would."""

    def work() -> int:
        publish = checkpoints.publish

        def limited(*arguments: Any) -> Path:
            path = publish(*arguments)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            return path

        checkpoints.publish = limited
        try:
            run.train(tiny_recipe(root, "full"))
        except OSError as error:
            (root / "full.out").write_text(str(error))
            return 2
        return 0

    status = os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])
    return status, (root / "full.out").read_text()


def main(root: Path) -> None:
    torch.set_num_threads(1)
    run.plot_loss = run.plot_gates = nothing  # drawing takes longer than training here
    kills = [(moment.__name__, killed(root, moment, None)) for moment in MOMENTS]
    generator = random.Random(1)
    for seconds in (generator.uniform(0.05, 1.0) for _ in range(4)):
        kills.append((f"after {seconds:.2f} s", killed(root, None, seconds)))
    kills.append(("undisturbed", killed(root, None, None)))
    stops = {number.name: stopped(root, number) for number in (signal.SIGINT, signal.SIGTERM)}
    print(json.dumps({"kills": kills, "stops": stops, "disk_full": disk_full(root)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

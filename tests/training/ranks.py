"""Trains the tiny recipe on several forked processes that talk through gloo; see test_distributed.py.

    PYTHONPATH=tests python tests/training/ranks.py ROOT NAME:STRATEGY:RANKS[:plain|:killed] NAME:copy:SOURCE ...

Every rank of every job writes ROOT/NAME-RANKS-<rank>.json. With `plain`, accelerate stays as it is and does not shard;
with `killed`, the last rank dies at step 8. NAME:copy:SOURCE makes NAME what the run SOURCE was at its last checkpoint
but one. Jobs with context or tensor parallelism train for 20 steps, others for 12.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from mdn.training import checkpoints, run
from training_support import tiny_recipe

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp", "shard_size": 2},
}
MODEL_PARALLEL: dict[str, dict[str, Any]] = {
    "context": {"context_parallel": 2},
    "zigzag": {"context_parallel": 2, "context_layout": "zigzag"},
    "tensor": {"tensor_parallel": 2},
    "context-tensor": {"context_parallel": 2, "tensor_parallel": 2},
    "context-fsdp": {"context_parallel": 2, "strategy": "fsdp"},
    "context-hsdp": {"context_parallel": 2, "strategy": "hsdp", "shard_size": 2},
}
STRATEGIES |= MODEL_PARALLEL


def pretend_gpus() -> None:
    """accelerate shards only on accelerators. For this test its CPU processes say they are GPU processes."""
    original = PartialState.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = patched


def job_recipe(root: Path, name: str, strategy: str) -> Any:
    steps = 20 if strategy in MODEL_PARALLEL else 12
    return tiny_recipe(root, name, distributed=STRATEGIES[strategy], training={"steps": steps})


def child(root: Path, name: str, strategy: str, ranks: int, how: str, rank: int, port: int) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), **place})
    torch.set_num_threads(1)
    run.plot_loss = run.plot_gates = lambda *_: None
    if "strategy" in STRATEGIES[strategy] and how != "plain":
        pretend_gpus()
    report: dict[str, Any] = {}
    remember_groups(report)
    if how == "killed" and rank == ranks - 1:
        die_at_step(8)
    try:
        report["step"] = run.train(job_recipe(root, name, strategy)).step
    except ValueError as error:
        report["error"] = str(error)
    (root / f"{name}-{ranks}-{rank}.json").write_text(json.dumps(report))
    os._exit(0)


def remember_groups(report: dict[str, Any]) -> None:
    """Note how many numbers each group of the optimiser holds on this rank, and whether they are sharded."""
    original = run.RecipeTrainer._prepare_for_training

    def prepare(self: Any, *arguments: Any) -> Any:
        prepared = original(self, *arguments)
        groups = self.optimizer.param_groups
        report["decay"] = [[group["weight_decay"], sum(p.numel() for p in group["params"])] for group in groups]
        report["kinds"] = sorted({type(p).__name__ for p in self.model.parameters()})
        return prepared

    run.RecipeTrainer._prepare_for_training = prepare


def die_at_step(number: int) -> None:
    original = run.RunFlow.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, *rest: Any, **named: Any) -> None:
        if state.global_step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, args, state, *rest, **named)

    run.RunFlow.on_step_end = on_step_end


def unfinished_copy(source: Path, target: Path) -> None:
    """The run as it was at its last checkpoint but one."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("summary.json"))
    checkpoints.remove(checkpoints.all_paths(target)[-1])


def main(root: Path, jobs: list[str]) -> None:
    tiny_recipe(root)  # writes the corpus
    for job in jobs:
        name, strategy, ranks, *how = job.split(":")
        if strategy == "copy":
            unfinished_copy(root / ranks, root / name)
            continue
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(int(ranks)):
            process = os.fork()
            if process == 0:
                try:
                    child(root, name, strategy, int(ranks), "".join(how), rank, port)
                finally:
                    os._exit(1)
            children.append(process)
        for process in children:
            os.waitpid(process, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

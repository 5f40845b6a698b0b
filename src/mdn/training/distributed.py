"""Several processes: how many, whether the sharding that was asked for happened, and whole models out of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mdn.training.checkpoints import Checkpoint


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """True in the one process that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def check_sharding(trainer: Any, checkpoint: Checkpoint | None) -> None:
    """Refuse, before any training, a sharding that the engine did not take up or a checkpoint of the other kind.

    accelerate silently trains with plain data parallelism where it does not support FSDP (on CPU, or in one process).
    """
    strategy = trainer.recipe.distributed.strategy
    wanted = strategy != "ddp"
    if wanted and not trainer.is_fsdp_enabled:
        raise ValueError(
            f"distributed.strategy={strategy} was asked for, but the model would not be sharded here: "
            "it needs several processes with GPUs (start with torchrun), or set distributed.strategy=ddp"
        )
    if checkpoint is not None and bool(checkpoint.facts.get("sharded")) != wanted:
        kind = "sharded" if checkpoint.facts.get("sharded") else "unsharded"
        raise ValueError(
            f"{checkpoint.path} is {kind}, but distributed.strategy={strategy}: "
            f"resume with {'fsdp or hsdp' if kind == 'sharded' else 'ddp'}"
        )


def assert_parameters_are_sharded(trainer: Any) -> None:
    """Once the model is wrapped: every parameter must be a DTensor if sharding was asked for."""
    if trainer.recipe.distributed.strategy == "ddp":
        return
    from torch.distributed.tensor import DTensor

    plain = [name for name, parameter in trainer.model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ValueError(
            f"distributed.strategy={trainer.recipe.distributed.strategy} was asked for, but {len(plain)} parameters "
            f"are not sharded, first {plain[0]}"
        )


@contextmanager
def full_model_saves(trainer: Any) -> Iterator[None]:
    """Inside the block `trainer.save_model` writes one whole model even if its parameters are sharded."""
    if not trainer.is_fsdp_enabled:
        yield
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    before = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.set_state_dict_type(getattr(before, "name", str(before)))

"""From a recipe and a number of ranks to the engine's arguments: batch in tokens -> rows, accumulation, sharding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from mdn.training.schema import Recipe, TrainingSettings

BLOCK_CLASS = "MomentumDeltaNetBlock"


@dataclass(frozen=True)
class BatchPlan:
    """How one optimiser step of `rows` sequences is spread: ranks x accumulation x micro."""

    rows: int
    ranks: int
    micro: int
    accumulation: int


def plan_batch(training: TrainingSettings, ranks: int) -> BatchPlan:
    """The largest micro-batch up to the wished one that divides a rank's share evenly."""
    rows = training.batch_sequences
    if rows % ranks:
        raise ValueError(
            f"training.batch_tokens={training.batch_tokens} is {rows} sequences of {training.sequence_length} tokens, "
            f"which {ranks} ranks cannot share evenly; use a number of ranks that divides {rows}"
        )
    share = rows // ranks
    micro = max(n for n in range(1, min(training.micro_batch_sequences, share) + 1) if share % n == 0)
    return BatchPlan(rows, ranks, micro, share // micro)


def _schedule(training: TrainingSettings) -> dict[str, Any]:
    if training.schedule == "cosine":
        rate = {"min_lr_rate": training.min_learning_rate_ratio}
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": rate}
    names = {"linear": "linear", "constant": "constant_with_warmup"}
    return {"lr_scheduler_type": names[training.schedule]}


def _sharding(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """FSDP2 (fsdp), or FSDP2 inside groups of `shard_size` ranks and plain copies across groups (hsdp)."""
    if recipe.distributed.strategy == "ddp":
        return {"ddp_find_unused_parameters": False} if ranks > 1 else {}
    arguments: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": [BLOCK_CLASS],
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
            "activation_checkpointing": recipe.training.gradient_checkpointing,
        },
    }
    if recipe.distributed.strategy == "hsdp":
        from accelerate import ParallelismConfig

        shard = recipe.distributed.shard_size or 1
        if ranks % shard:
            raise ValueError(f"distributed.shard_size={shard} does not divide the number of ranks, {ranks}")
        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=ranks // shard, dp_shard_size=shard)
    return arguments


def training_arguments(recipe: Recipe, run_dir: Path, ranks: int) -> TrainingArguments:
    training, plan = recipe.training, plan_batch(recipe.training, ranks)
    on_cpu = not torch.cuda.is_available()
    sharded = recipe.distributed.strategy != "ddp"
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        seed=recipe.seed,
        data_seed=recipe.seed,
        max_steps=training.total_steps,
        per_device_train_batch_size=plan.micro,
        gradient_accumulation_steps=plan.accumulation,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        adam_epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip_norm,
        bf16=training.precision == "bfloat16",
        gradient_checkpointing=training.gradient_checkpointing and not sharded,
        torch_compile=training.compile,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        dataloader_num_workers=training.loader_workers,
        remove_unused_columns=False,
        include_num_input_tokens_seen="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **_schedule(training),
        **_sharding(recipe, ranks),
    )
    if arguments.n_gpu > 1:
        # The engine would spread one process over all GPUs and so multiply the batch. Several GPUs are torchrun's job.
        arguments._n_gpu = 1
    return arguments

"""The Hugging Face Trainer with atomic checkpoints, a NaN guard, coordinated stopping and reliable decay groups.

The Trainer's loop is unchanged. What is added overrides its methods for the order of the rows, the groups of the
optimiser (collected before any wrapping), the loss and the gradient norm of a step (the guard), and for saving
checkpoints (written aside, then published) and loading them.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from mdn.common.errors import one_line
from mdn.models.call_checks import refuse_sequence_parallelism
from mdn.parallel.tensor import load_parts, split_model
from mdn.training import checkpoints
from mdn.training.checkpoints import Checkpoint
from mdn.training.mesh import RankMesh, mesh_shape
from mdn.training.monitor import NonFiniteError, explain
from mdn.training.optimizer_state import CANONICAL_GROUPS, load_whole_state, regrouped_schedule, whole_state
from mdn.training.recipe import Recipe, TrainingSettings
from mdn.training.run_plan import plan_batch

BLOCK_CLASS = "MomentumDeltaNetBlock"


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
    training, plan = recipe.training, plan_batch(recipe.training, mesh_shape(recipe.distributed, ranks).data)
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
        # The Trainer would spread one process over all GPUs and so multiply the batch. Several GPUs are torchrun's job.
        arguments._n_gpu = 1
    return arguments


class StopRequested(BaseException):
    """The user (or a job scheduler) asked to stop, and nothing is pending that must be saved first."""


class StopSignal:
    """Remembers that a stop was requested. While `deferred` it only remembers; otherwise it raises StopRequested."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested
        self.requested = True
        if not self._deferred:
            raise StopRequested(signal.Signals(number).name)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now; the last checkpoint on disk stays intact

    @contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Handle the signals inside the block. Only the main thread can; elsewhere nothing is installed."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal only sets `requested`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


@dataclass(frozen=True)
class StepRecord:
    """What is known about a step before the optimiser acts."""

    loss: float
    grad_norm: float
    learning_rate: float
    bad: bool
    stop: bool


class RecipeTrainer(Trainer):
    """Trains `model` on `dataset` as `recipe` says. `identity` goes into every checkpoint; `step` is the last step."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        dataset: Dataset,
        collator: Any,
        arguments: TrainingArguments,
        identity: dict[str, Any],
        stop: StopSignal,
        tokenizer: Any = None,
    ) -> None:
        self.recipe = recipe
        self.identity = identity
        self.stop_signal = stop
        self.summed_loss: torch.Tensor | None = None
        self.step: StepRecord | None = None
        self.skipped_in_a_row = 0
        self._last_inputs: dict[str, Any] = {}
        self._staging = False
        self._decayed = decayed_parameters(model, recipe.training.decay_gates)
        self._special_tokens = {name: getattr(model.config, name) for name in ("bos_token_id", "pad_token_id")}
        refuse_sequence_parallelism(arguments.parallelism_config)
        super().__init__(
            model=model, args=arguments, train_dataset=dataset, data_collator=collator, processing_class=tokenizer
        )
        refuse_sequence_parallelism()
        self.mesh = RankMesh(recipe.distributed, arguments.world_size, arguments.device.type)
        if self.mesh.shape.tensor > 1:
            # Only now: while it is whole, the Trainer takes the model for an ordinary one.
            split_model(self.model, self.mesh.tensor)  # type: ignore[arg-type]
            self.is_distributed_loading_by_transformers = True
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)

    # ---- order of the data

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)  # type: ignore[arg-type]

    def get_train_dataloader(self) -> DataLoader:
        """The Trainer gives every rank different rows; ranks of context or tensor parallelism must get the same."""
        if self.mesh.shape.data == self.args.world_size:
            return super().get_train_dataloader()
        loader: DataLoader = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        spread = {"num_processes": self.mesh.shape.data, "process_index": self.mesh.data_rank}
        prepared: DataLoader = prepare_data_loader(loader, self.args.device, **spread, put_on_device=True)
        return prepared

    # ---- groups of the optimiser

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return self._decayed

    def follow_schedule(self) -> None:
        """Give the optimiser the rate of this recipe's schedule; it has been loaded with that of the checkpoint's.

        They differ only when a run is lengthened.
        """
        scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # accelerate wraps it
        rates = [base * at(scheduler.last_epoch) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        scheduler._last_lr = rates  # what the Trainer reports as the rate of the coming step
        for group, rate in zip(scheduler.optimizer.param_groups, rates):
            group["lr"] = rate

    def keep_special_tokens(self) -> None:
        """Undo what the Trainer has taken over from the tokenizer: texts begin with the end-of-text id here, and the
        embedding of a padding token gets no gradient, which would be that of end of text if the tokenizer pads with it.
        """
        model: Any = self.model
        for config in (model.config, model.generation_config):
            for name, token in self._special_tokens.items():
                setattr(config, name, token)

    # ---- the loss of a step, and the guard

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if self.mesh.shape.context > 1:
            inputs, labels, _ = self.mesh.local(self._prepare_inputs(inputs))
            inputs["shift_labels"] = labels
        self._last_inputs = inputs
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.mesh.shape.tensor > 1 and self.accelerator.sync_gradients:
            self._average_gradients()
        self.summed_loss = loss if self.summed_loss is None else self.summed_loss + loss
        return loss

    def _average_gradients(self) -> None:
        """Over the ranks with the same heads: a model with cut parameters is not wrapped for data parallelism."""
        for parameter in self.model.parameters():  # type: ignore[union-attr]
            grad = parameter.grad
            if grad is not None and self.mesh.copies is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(local, group=self.mesh.copies)
                local /= self.mesh.copies.size()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing to do for the Trainer: ``_average_gradients`` does it."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """With context parallelism the loss is that of all tokens, and its gradient that of this rank's: gradients are
        to be summed over the context, but data parallelism averages them over all ranks."""
        loss: Any = super().compute_loss(*arguments, **options)
        factor = self.mesh.shape.context
        return loss if factor == 1 else loss + (factor - 1) * (loss - loss.detach())

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Called once per step, after clipping and before the optimiser: the last moment to refuse a bad gradient."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        assert self.summed_loss is not None
        norm = float(grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm)
        loss, self.summed_loss = float(self.summed_loss), None
        bad = not (math.isfinite(loss) and math.isfinite(norm))
        self.step = self._agree(StepRecord(loss, norm, self._get_learning_rate(), bad, self.stop_signal.requested))
        if self.step.bad:
            self._refuse_step(model)
        else:
            self.skipped_in_a_row = 0
        return grad_norm

    def _agree(self, here: StepRecord) -> StepRecord:
        """The step as all ranks together see it: the mean loss, and bad or stopping if any rank is."""
        if self.args.world_size == 1:
            return here
        facts = torch.tensor([here.loss, float(here.bad), float(here.stop)], device=self.args.device)
        loss, bad, stop = self.accelerator.reduce(facts, reduction="sum").tolist()
        return StepRecord(loss / self.args.world_size, here.grad_norm, here.learning_rate, bad > 0, stop > 0)

    def _refuse_step(self, model: nn.Module) -> None:
        assert self.step is not None
        self.skipped_in_a_row += 1
        inputs = self._prepare_inputs(self._last_inputs)
        number, plain = self.state.global_step + 1, self.accelerator.unwrap_model(model)
        text = explain(plain, inputs, number, self.step.loss, self.step.grad_norm)
        limit = self.recipe.training.max_skipped_steps
        if self.recipe.training.non_finite == "stop":
            raise NonFiniteError(text, number)
        if self.skipped_in_a_row > limit:
            text += f"; {limit} steps in a row were skipped already (training.max_skipped_steps)"
            raise NonFiniteError(text, number)
        if self.is_world_process_zero():
            tqdm.write(f"step skipped: {text}", file=sys.stderr)
        model.zero_grad()  # without gradients the optimiser leaves parameters and its own state as they are

    # ---- checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.mesh.shape.tensor == 1:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        files = sorted(Path(resume_from_checkpoint).glob("*.safetensors"))
        load_parts(self.model, {name: x for file in files for name, x in load_file(file).items()})  # type: ignore[arg-type]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._whole_optimizer():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._whole_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)

    @contextmanager
    def _whole_optimizer(self) -> Iterator[None]:
        """Inside the block the Trainer sees the states of a run without tensor parallelism."""
        if self.mesh.shape.tensor == 1:
            yield
            return
        optimizer, scheduler, model = self.optimizer, self.lr_scheduler, self.model
        assert optimizer is not None and scheduler is not None and model is not None  # noqa: PT018
        inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        state = whole_state(inner, model, self._decayed) if inner.state else {}
        schedule, groups = scheduler.state_dict(), len(inner.param_groups)
        self.optimizer = SimpleNamespace(  # type: ignore[assignment]
            state_dict=lambda: state,
            load_state_dict=lambda saved: load_whole_state(inner, model, self._decayed, saved),
        )
        self.lr_scheduler = SimpleNamespace(  # type: ignore[assignment]
            state_dict=lambda: regrouped_schedule(schedule, CANONICAL_GROUPS),
            load_state_dict=lambda saved: scheduler.load_state_dict(regrouped_schedule(saved, groups)),
        )
        try:
            yield
        finally:
            self.optimizer, self.lr_scheduler = optimizer, scheduler

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = str(super()._get_output_dir(trial))
        return str(Path(run_dir) / checkpoints.STAGING) if self._staging else run_dir

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = self.recipe.output_dir
        name = f"{checkpoints.PREFIX}{self.state.global_step}"
        staged = run_dir / checkpoints.STAGING / name
        try:
            if self.is_world_process_zero():
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self._staging = True
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                facts = {"identity": self.identity, "sharded": self.is_fsdp_enabled, "world_size": self.args.world_size}
                checkpoints.publish(staged, run_dir, self.state.global_step, facts)
                checkpoints.rotate(run_dir, self.recipe.logging.keep_checkpoints)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as a RuntimeError
            raise _cannot_write(name, run_dir, error) from error
        finally:
            self._staging = False
        self.accelerator.wait_for_everyone()


def _cannot_write(name: str, run_dir: Path, error: Exception) -> OSError:
    """The one line for a full disk or a directory that cannot be written; nothing half-written stays behind."""
    written = sum(path.stat().st_size for path in (run_dir / checkpoints.STAGING).rglob("*") if path.is_file())
    free = shutil.disk_usage(run_dir).free
    reason = f"{one_line(error, 300)}; {free / 1e9:.1f} GB are free there"
    # torch and safetensors do not pass on the system's "no space left"; less free space than what was just written does
    if free < max(written, 1 << 20) and "disk is full" not in reason:
        reason = f"the disk is full ({reason})"
    checkpoints.clear_staging(run_dir)
    kept = [path.name for path in checkpoints.all_paths(run_dir)]
    return OSError(
        f"{name} could not be written in {run_dir}: {reason}; "
        f"{'the last good checkpoint is ' + kept[-1] if kept else 'there is no earlier checkpoint'}"
    )


def decayed_parameters(model: nn.Module, decay_gates: bool) -> list[str]:
    """Names of the parameters weight decay acts on: the matrices, or with `decay_gates` all.

    A matrix is a `weight` of two or more dimensions (of a linear map, a convolution or the embedding). Other parameters
    scale single channels whatever their shape: RWKV-7 stores vectors as `[1, 1, D]` and `[H, D / H]`.
    """
    if decay_gates:
        return [name for name, _ in model.named_parameters()]
    listed: Any = getattr(model, "no_weight_decay_names", list)
    undecayed = set(listed())
    matrices = (n for n, p in model.named_parameters() if n.rpartition(".")[2] == "weight" and p.ndim > 1)
    return [name for name in matrices if name not in undecayed]


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """True in the one process that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def check_sharding(trainer: Any, checkpoint: Checkpoint | None) -> None:
    """Refuse, before any training, a sharding that did not happen or a checkpoint of the other kind.

    accelerate silently trains with plain data parallelism where it does not support FSDP (on CPU, or in one process).
    """
    strategy = trainer.recipe.distributed.strategy
    requested = strategy != "ddp"
    if requested and not trainer.is_fsdp_enabled:
        raise ValueError(
            f"distributed.strategy={strategy} was requested, but the model would not be sharded here: "
            "it needs several processes with GPUs (start with torchrun), or set distributed.strategy=ddp"
        )
    if checkpoint is not None and bool(checkpoint.facts.get("sharded")) != requested:
        kind = "sharded" if checkpoint.facts.get("sharded") else "unsharded"
        raise ValueError(
            f"{checkpoint.path} is {kind}, but distributed.strategy={strategy}: "
            f"resume with {'fsdp or hsdp' if kind == 'sharded' else 'ddp'}"
        )


def assert_parameters_are_sharded(trainer: Any) -> None:
    """Once the model is wrapped: every parameter must be a DTensor if sharding was requested."""
    if trainer.recipe.distributed.strategy == "ddp":
        return
    plain = [name for name, parameter in trainer.model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ValueError(
            f"distributed.strategy={trainer.recipe.distributed.strategy} was requested, but {len(plain)} parameters "
            f"are not sharded, first {plain[0]}"
        )


@contextmanager
def full_model_saves(trainer: Any) -> Iterator[None]:
    """Inside the block `trainer.save_model` writes one complete model even if its parameters are sharded."""
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

"""The Hugging Face Trainer, completed: whole checkpoints, a NaN guard, agreed stops, decay groups that hold.

The engine's loop is untouched. What is added hangs on five of its methods: the sampler (rows in the order of the run),
training_step (the loss of every step), _get_grad_norm (the guard), _save_checkpoint (written aside, then published) and
get_decay_parameter_names (collected before any wrapping).
"""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from mdn.training import checkpoints
from mdn.training.non_finite import NonFiniteError, explain
from mdn.training.schema import Recipe
from mdn.training.stopping import StopSignal


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
        super().__init__(
            model=model, args=arguments, train_dataset=dataset, data_collator=collator, processing_class=tokenizer
        )
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)

    # ---- order of the data

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)  # type: ignore[arg-type]

    # ---- groups of the optimiser

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return self._decayed

    # ---- the loss of a step, and the guard

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self._last_inputs = inputs
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.summed_loss = loss if self.summed_loss is None else self.summed_loss + loss
        return loss

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
            raise NonFiniteError(text)
        if self.skipped_in_a_row > limit:
            raise NonFiniteError(f"{text}; {limit} steps in a row were skipped already (training.max_skipped_steps)")
        if self.is_world_process_zero():
            tqdm.write(f"step skipped: {text}", file=sys.stderr)
        model.zero_grad()  # without gradients the optimiser leaves parameters and its own state as they are

    # ---- checkpoints

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
    checkpoints.clear_staging(run_dir)
    kept = [path.name for path in checkpoints.all_paths(run_dir)]
    free = shutil.disk_usage(run_dir).free
    reason = " ".join(str(error).split())[:300]
    return OSError(
        f"{name} could not be written in {run_dir} ({reason}); {free / 1e9:.1f} GB are free there; "
        f"{'the last good checkpoint is ' + kept[-1] if kept else 'there is no earlier checkpoint'}"
    )


def decayed_parameters(model: nn.Module, decay_gates: bool) -> list[str]:
    """Names of the parameters weight decay acts on: not norms, biases and gate parameters, unless `decay_gates`."""
    names = [name for name, _ in model.named_parameters()]
    if decay_gates:
        return names
    listed: Any = getattr(model, "no_weight_decay_names", list)
    undecayed = set(listed())
    return [n for n in names if n not in undecayed and not n.endswith("bias") and "norm" not in n.rsplit(".", 2)[-2]]

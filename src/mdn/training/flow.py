"""What happens between steps: metrics, progress, gate statistics, evaluations, checkpoints, and stopping when asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mdn.training.distributed import assert_parameters_are_sharded
from mdn.training.gate_statistics import measure
from mdn.training.metrics import MetricsLog
from mdn.training.progress import ProgressBar, TensorBoard
from mdn.training.schema import Recipe
from mdn.training.trainer import RecipeTrainer


class RunFlow(TrainerCallback):
    """Hangs on the engine's step events. All ranks run it (measuring is collective); only the first one writes."""

    def __init__(
        self, recipe: Recipe, trainer: RecipeTrainer, run_dir: Path, probe: torch.Tensor, evaluate: Callable[[], dict]
    ) -> None:
        self.recipe = recipe
        self.trainer = trainer
        self.probe = probe
        self.evaluate = evaluate
        self.writes = trainer.is_world_process_zero()
        self.metrics = MetricsLog(run_dir / "metrics.jsonl")
        self.run_dir = run_dir
        self.stopped = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert_parameters_are_sharded(self.trainer)
        settings = self.recipe.training
        if self.writes:
            # A run without a checkpoint starts its log anew: what stands at step 0 is measured again below.
            self.metrics.resume_at(state.global_step or -1)
        self.bar = ProgressBar(settings.total_steps, state.global_step, settings.batch_tokens, self.writes)
        wanted = self.writes and self.recipe.logging.tensorboard
        self.board = TensorBoard(self.run_dir / "tensorboard", state.global_step + 1, wanted)
        if self._due(self.recipe.logging.gates_every, state.global_step) and state.global_step == 0:
            self._write_gates(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step, last, logging = state.global_step, self.trainer.step, self.recipe.logging
        assert last is not None
        if self.writes:
            tokens = step * self.recipe.training.batch_tokens
            facts = {"loss": last.loss, "grad_norm": last.grad_norm, "learning_rate": last.learning_rate}
            self.metrics.write({"step": step, **facts, "tokens": tokens, **({"skipped": True} if last.bad else {})})
            if step % logging.log_every == 0:
                self.board.scalars("train", facts, step)
        self.bar.step(last.loss)
        if self._due(logging.gates_every, step):
            self._write_gates(step)
        if self._due(logging.evaluate_every, step) and step < state.max_steps:
            self._write_held_out(step)
        self.stopped = last.stop and step < state.max_steps
        control.should_training_stop = control.should_training_stop or self.stopped
        control.should_save = self._due(logging.save_every, step) or self.stopped or step >= state.max_steps

    def close(self) -> None:
        """After training, however it ended."""
        for thing in ("bar", "board"):
            if hasattr(self, thing):
                getattr(self, thing).close()

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _write_gates(self, step: int) -> None:
        assert self.trainer.model is not None
        layers = measure(self.trainer.model, self.probe.to(self.trainer.args.device))
        if self.writes and layers:
            self.metrics.write({"step": step, "gates": layers})
            for values in layers:
                layer = int(values["layer"])
                self.board.scalars(f"gates/{layer:02d}", {k: v for k, v in values.items() if k != "layer"}, step)

    def _write_held_out(self, step: int) -> None:
        result = self.evaluate()
        if self.writes:
            self.metrics.write({"step": step, "held_out": result})
            self.board.scalars("held_out", {key: result[key] for key in ("loss", "bits_per_byte")}, step)

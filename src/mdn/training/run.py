"""One training run from beginning to end: data, model, resume, training, evaluation, and what is left behind.

    result = train(load_recipe("demo"))

The run's directory: recipe.yaml, metrics.jsonl, tensorboard/, checkpoint-<step>/, and at the end model/, summary.json,
loss.png and gates.png. Calling it again goes on where it stopped, or reports a finished run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mdn.common.files import lock_for_life, write_atomically
from mdn.common.results import command_line
from mdn.training import checkpoints
from mdn.training.build import build_model, identity_of, model_config
from mdn.training.dataset import PackCollator, PackedSequences, PreparedData, prepare_data
from mdn.training.evaluate import complete, evaluate, measure_references
from mdn.training.model_card import model_card, plot_gates, plot_loss
from mdn.training.monitor import MetricsLog, ProgressBar, TensorBoard, measure
from mdn.training.recipe import Recipe, to_yaml
from mdn.training.tokenizer import Encoder
from mdn.training.trainer import (
    RecipeTrainer,
    StopRequested,
    StopSignal,
    assert_parameters_are_sharded,
    check_sharding,
    full_model_saves,
    is_first_rank,
    training_arguments,
    world_size,
)

PROBE_TOKENS = 1024


@dataclass(frozen=True)
class RunResult:
    """`summary` is None when the run was stopped before its end."""

    run_dir: Path
    step: int
    summary: dict[str, Any] | None


def train(recipe: Recipe, command: str | None = None) -> RunResult:
    """Train, go on training, or report a finished run. `command` is what figures and the model card are signed with."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run_dir = recipe.output_dir
    stop = StopSignal()
    try:
        with stop.installed():
            return _train(recipe, run_dir, stop, command or command_line())
    except StopRequested:
        newest = checkpoints.all_paths(run_dir)
        return RunResult(run_dir, checkpoints.step_of(newest[-1]) if newest else 0, None)
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _train(recipe: Recipe, run_dir: Path, stop: StopSignal, command: str) -> RunResult:
    first = is_first_rank()
    if first:
        _claim(run_dir)
    data = prepare_data(recipe)
    config = model_config(recipe, data.cache.vocab_size, data.cache.end_id)
    identity = identity_of(recipe, config, data.cache.directory.name)
    checkpoint = checkpoints.latest(run_dir, identity)
    finished = _finished(run_dir, identity)
    if finished is not None:
        return RunResult(run_dir, finished["steps"], finished)
    if first:
        write_atomically(run_dir / "recipe.yaml", to_yaml(recipe).encode())
    if checkpoint is not None and first:
        print(f"resuming {checkpoint.path} (step {checkpoint.step})", file=sys.stderr)

    trainer, flow = _build_trainer(recipe, run_dir, data, config, identity, stop)
    check_sharding(trainer, checkpoint)
    started = time.monotonic()
    try:
        with stop.deferred():
            trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    finally:
        flow.close()
    seconds = time.monotonic() - started
    if flow.stopped or stop.requested:
        return RunResult(run_dir, trainer.state.global_step, None)
    facts = {"seconds": seconds, "identity": identity}
    summary = _finish(recipe, run_dir, data, trainer, flow, command, facts)
    return RunResult(run_dir, trainer.state.global_step, summary)


def _claim(run_dir: Path) -> None:
    """Make the directory and lock it, so that an unwritable or occupied place is noticed before any work."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not lock_for_life(run_dir / ".lock"):
            raise ValueError(f"another process is training in {run_dir}; wait for it, or give another `output`")
        checkpoints.clear_staging(run_dir)
    except OSError as error:
        raise OSError(f"output {run_dir} cannot be written: {error.strerror or error}") from None


def _finished(run_dir: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of a run that is complete and of this recipe."""
    path = run_dir / "summary.json"
    if not path.is_file() or not (run_dir / "model" / "config.json").is_file():
        return None
    summary = json.loads(path.read_text())
    same = summary.get("identity") == json.loads(json.dumps(identity, default=str))
    return summary if same else None


def _build_trainer(
    recipe: Recipe, run_dir: Path, data: PreparedData, config: Any, identity: dict[str, Any], stop: StopSignal
) -> tuple[RecipeTrainer, RunFlow]:
    training = recipe.training
    arguments = training_arguments(recipe, run_dir, world_size())
    rows = training.total_steps * training.batch_sequences
    trainer = RecipeTrainer(
        recipe=recipe,
        model=build_model(recipe, config),
        dataset=PackedSequences(data.training, training.sequence_length, rows, recipe.seed),
        collator=PackCollator(recipe.data.reset_at_documents),
        arguments=arguments,
        identity=identity,
        stop=stop,
        tokenizer=AutoTokenizer.from_pretrained(data.tokenizer),
    )

    def held_out() -> dict[str, float]:
        assert trainer.model is not None
        show = trainer.is_world_process_zero()
        reset = recipe.data.reset_at_documents
        return evaluate(
            trainer.model, data.held_out, training.sequence_length, reset, accelerator=trainer.accelerator, show=show
        )

    ids, _ = data.held_out.read(0, min(len(data.held_out), training.sequence_length, PROBE_TOKENS))
    flow = RunFlow(recipe, trainer, run_dir, torch.from_numpy(ids).unsqueeze(0), held_out)
    trainer.add_callback(flow)
    return trainer, flow


def _finish(
    recipe: Recipe,
    run_dir: Path,
    data: PreparedData,
    trainer: RecipeTrainer,
    flow: RunFlow,
    command: str,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Evaluate, save the model, draw, write the card. The summary comes last: with it the run counts as finished."""
    held_out = flow.evaluate()
    staged = run_dir / checkpoints.STAGING / "model"
    with full_model_saves(trainer):
        trainer.save_model(str(staged))
    trainer.accelerator.wait_for_everyone()
    summary = {**_summary(recipe, data, trainer, held_out), **facts}
    if not trainer.is_world_process_zero():
        return summary
    summary["references"] = measure_references(data.training, data.held_out, Encoder(data.tokenizer))
    flow.metrics.write_once({"step": trainer.state.global_step, "held_out": held_out})
    (staged / "training_args.bin").unlink(missing_ok=True)
    summary["sample"] = complete(staged, recipe.sample) if recipe.sample.prompt else None
    loss_plot, _ = plot_loss(run_dir, recipe, command), plot_gates(run_dir, recipe, command)
    if loss_plot is not None:
        shutil.copy(loss_plot, staged / "loss.png")
    (staged / "README.md").write_text(model_card(recipe, summary, command, summary["sample"]), encoding="utf-8")
    shutil.rmtree(run_dir / "model", ignore_errors=True)
    os.replace(staged, run_dir / "model")
    checkpoints.clear_staging(run_dir)
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=1, default=str).encode())
    return summary


def _summary(recipe: Recipe, data: PreparedData, trainer: RecipeTrainer, held_out: dict[str, float]) -> dict[str, Any]:
    model: Any = trainer.model
    return {
        "name": recipe.name,
        "mixer": model.config.mixer,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": json.loads((data.cache.directory / "index.json").read_text())["corpus"],
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.training.batch_tokens,
        "held_out": held_out,
    }


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

"""One training run from beginning to end: data, model, resume, training, evaluation, and the files it writes.

    result = train(load_recipe("demo"))

The run's directory: recipe.yaml, metrics.jsonl, tensorboard/, checkpoint-<step>/, and at the end model/, summary.json,
loss.png and gates.png. Calling it again resumes where it stopped, or reports a finished run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mdn.common import progress as bars
from mdn.common.errors import one_line
from mdn.common.files import lock_for_life, read_json, share, write_atomically
from mdn.common.hardware import Threads
from mdn.common.heap import keep_freed_memory
from mdn.common.results import command_line
from mdn.training import checkpoints
from mdn.training.build import (
    build_model,
    check_initial_tokenizer,
    identity_of,
    model_config,
    refuse_indivisible,
    refuse_too_large,
)
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
    """`summary` is None when the run was stopped before its end; its folder then resumes it if `is_resumable`."""

    run_dir: Path
    step: int
    summary: dict[str, Any] | None
    is_resumable: bool = True


def train(recipe: Recipe, command: str | None = None) -> RunResult:
    """Train, resume, or report a finished run. Figures and the model card are labelled with `command`."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    keep_freed_memory()
    run_dir = recipe.output_dir
    stop = StopSignal()
    try:
        with stop.installed():
            return _train(recipe, run_dir, stop, command or command_line())
    except StopRequested:
        newest = checkpoints.all_paths(run_dir)
        step, written = checkpoints.step_of(newest[-1]) if newest else 0, run_dir / "recipe.yaml"
        # A finished run that is lengthened keeps its old recipe until training begins.
        is_resumable = step > 0 and written.is_file() and written.read_bytes() == to_yaml(recipe).encode()
        return RunResult(run_dir, step, None, is_resumable)
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _train(recipe: Recipe, run_dir: Path, stop: StopSignal, command: str) -> RunResult:
    first = is_first_rank()
    small = model_config(recipe, vocab_size=1, end_id=0)
    refuse_too_large(recipe, small)  # before the text is tokenised
    refuse_indivisible(recipe, small)
    if first:
        _claim(run_dir)
    data = prepare_data(recipe)
    config = model_config(recipe, data.cache.vocab_size, data.cache.end_id)
    identity = identity_of(recipe, config, data.cache.directory.name)
    finished = _finished(run_dir, identity)
    if finished is not None:
        return RunResult(run_dir, finished["steps"], finished)
    checkpoint, damaged = checkpoints.latest(run_dir, identity)
    trainer, flow = _build_trainer(recipe, run_dir, data, config, identity, stop)
    check_sharding(trainer, checkpoint)
    trainer.accelerator.wait_for_everyone()  # every rank has looked at the damaged checkpoints
    if first:
        write_atomically(run_dir / "recipe.yaml", to_yaml(recipe).encode())
        _report_start(recipe, checkpoint, damaged)
    started = time.monotonic()
    try:
        with stop.deferred():
            trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    finally:
        flow.close()
        flow.threads.restore()
    seconds = time.monotonic() - started
    if flow.stopped or stop.requested:
        return RunResult(run_dir, trainer.state.global_step, None)
    facts = {"seconds": seconds, "identity": identity}
    summary = _finish(recipe, run_dir, data, trainer, flow, command, facts)
    return RunResult(run_dir, trainer.state.global_step, summary)


def _report_start(recipe: Recipe, checkpoint: checkpoints.Checkpoint | None, damaged: dict[Path, str]) -> None:
    """Name what is resumed, set damaged checkpoints aside, and say what lengthening does to the learning rate."""
    for path, reason in damaged.items():
        print(f"warning: {reason}; set aside as {checkpoints.set_aside(path).name}", file=sys.stderr)
    if checkpoint is None:
        return
    print(f"resuming {checkpoint.path} (step {checkpoint.step})", file=sys.stderr)
    before, steps = checkpoint.facts.get("identity", {}).get("training.steps"), recipe.training.total_steps
    if before != steps:
        note = f"lengthened from {before} to {steps} steps"
        if recipe.training.schedule != "constant":
            note += (
                f": the learning rate follows the {recipe.training.schedule} schedule of {steps} steps from here on: "
                f"it jumps now, and the result is not that of a run planned with {steps} steps"
            )
        print(note, file=sys.stderr)


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
    summary = read_json(path)
    same = summary.get("identity") == json.loads(json.dumps(identity, default=str))
    return summary if same else None


def _build_trainer(
    recipe: Recipe, run_dir: Path, data: PreparedData, config: Any, identity: dict[str, Any], stop: StopSignal
) -> tuple[RecipeTrainer, RunFlow]:
    training = recipe.training
    arguments = training_arguments(recipe, run_dir, world_size())
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)
    check_initial_tokenizer(recipe, tokenizer)
    rows = training.total_steps * training.batch_sequences
    trainer = RecipeTrainer(
        recipe=recipe,
        model=build_model(recipe, config),
        dataset=PackedSequences(data.training, training.sequence_length, rows, recipe.seed),
        collator=PackCollator(recipe.data.reset_at_documents),
        arguments=arguments,
        identity=identity,
        stop=stop,
        tokenizer=tokenizer,
    )

    def held_out() -> dict[str, float]:
        assert trainer.model is not None
        show = trainer.is_world_process_zero()
        reset = recipe.data.reset_at_documents
        return evaluate(
            trainer.model,
            data.held_out,
            training.sequence_length,
            reset,
            accelerator=trainer.accelerator,
            mesh=trainer.mesh,
            show=show,
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
    """Evaluate and save the model, then add what is nice to have. The summary comes last: with it the run is finished.

    The model is in its place before anything that needs much memory or another library: a failure there becomes a note.
    """
    held_out = flow.evaluate()
    staged = run_dir / checkpoints.STAGING / "model"
    with full_model_saves(trainer):
        trainer.save_model(str(staged))
    trainer.accelerator.wait_for_everyone()
    summary = {**_summary(recipe, data, trainer, held_out), **facts}
    if not trainer.is_world_process_zero():
        return summary
    flow.metrics.write_once({"step": trainer.state.global_step, "held_out": held_out})
    model = _publish_model(staged, run_dir)
    notes: list[str] = []
    with _optional("references", notes):
        summary["references"] = measure_references(data.training, data.held_out, Encoder(data.tokenizer), notes)
    with _optional("sample", notes):
        summary["sample"] = complete(model, recipe.sample) if recipe.sample.prompt else None
    with _optional("figures", notes):
        loss_plot, _ = plot_loss(run_dir, recipe, command), plot_gates(run_dir, recipe, command)
        if loss_plot is not None:
            shutil.copy(loss_plot, model / "loss.png")
    summary["notes"] = notes
    (model / "README.md").write_text(model_card(recipe, summary, command), encoding="utf-8")
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=1, default=str).encode())
    return summary


def _publish_model(staged: Path, run_dir: Path) -> Path:
    """Move the written model to its place, readable like any other file."""
    (staged / "training_args.bin").unlink(missing_ok=True)
    share(staged)
    shutil.rmtree(run_dir / "model", ignore_errors=True)
    os.replace(staged, run_dir / "model")
    checkpoints.clear_staging(run_dir)
    return run_dir / "model"


@contextmanager
def _optional(what: str, notes: list[str]) -> Iterator[None]:
    """A finished training is not lost because something after it fails; the failure is reported at the end."""
    try:
        yield
    except Exception as error:
        notes.append(f"{what} left out: {type(error).__name__}: {one_line(error, 200)}")


def _summary(recipe: Recipe, data: PreparedData, trainer: RecipeTrainer, held_out: dict[str, float]) -> dict[str, Any]:
    model: Any = trainer.model
    return {
        "name": recipe.name,
        "mixer": model.config.mixer,
        "parameters": model.num_parameters(),
        "data": data.cache.index["corpus"],
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.training.batch_tokens,
        "held_out": held_out,
    }


class RunFlow(TrainerCallback):
    """Acts at the Trainer's step events. All ranks run it (measuring is collective); only the first one writes."""

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
        alone_on_cpu = trainer.args.world_size == 1 and trainer.args.device.type == "cpu"
        self.threads = Threads(recipe.training.threads, adapts=alone_on_cpu)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert_parameters_are_sharded(self.trainer)
        self.trainer.follow_schedule()
        self.trainer.keep_special_tokens()
        settings = self.recipe.training
        if self.writes:
            # A run without a checkpoint starts its log anew: step 0 is measured again below.
            self.metrics.resume_at(state.global_step or -1)
        self.bar = ProgressBar(settings.total_steps, state.global_step, settings.batch_tokens, self.writes)
        enabled = self.writes and self.recipe.logging.tensorboard
        self.board = TensorBoard(self.run_dir / "tensorboard", state.global_step + 1, enabled)
        self._adapt_threads(now=True)
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
        self._adapt_threads()
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

    def _adapt_threads(self, now: bool = False) -> None:
        change = self.threads.adapt(now=now)
        if change is not None and self.writes and not bars.silent:
            tqdm.write(change, file=sys.stderr)

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

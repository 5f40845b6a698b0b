"""What is recorded while training runs: metrics.jsonl, gate statistics, progress, TensorBoard, and the cause of a NaN.

metrics.jsonl has one JSON object per line, each with its `step`. A resumed run continues it as if never interrupted.

{"step": 1, "loss": 8.31, "grad_norm": 2.4, "learning_rate": 1e-4, "tokens": 4096}        every step
{"step": 50, "gates": [{"layer": 0, "alpha": 0.61, ...}, ...]}                            every gates_every steps
{"step": 400, "held_out": {"loss": ..., "perplexity": ..., "bits_per_byte": ...}}         evaluations

Gate statistics are means of alpha, mu, beta and eta per layer, the share of log mu at its clamp, and state norms, read
from one forward pass over a fixed piece of held-out text, so that different steps and runs can be compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mdn.common import progress as bars
from mdn.common.files import write_atomically


class MetricsLog:
    """Appends lines; `resume_at(step)` first drops what was written after the checkpoint that training resumes from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume_at(self, step: int) -> None:
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def write(self, *lines: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines))

    def write_once(self, line: dict[str, Any]) -> None:
        """Append the line unless one with the same step and keys exists (a run killed after its last evaluation)."""
        if not any(old["step"] == line["step"] and old.keys() == line.keys() for old in read_metrics(self.path)):
            self.write(line)


def _plain(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; the last one is left out if a kill has cut it."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


class ProgressBar:
    """One bar over all steps; a resumed run starts where it stopped. Silent on every rank but the first."""

    def __init__(self, total: int, done: int, tokens_per_step: int, show: bool) -> None:
        self.tokens_per_step = tokens_per_step
        self.bar = bars.progress(
            total=total,
            initial=done,
            desc="train",
            unit="step",
            disable=bars.silent or not show,
            bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def step(self, loss: float | None) -> None:
        rate = self.bar.format_dict["rate"]
        words = [] if loss is None else [f"loss {loss:.3f}"]
        if rate:
            words.append(f"{rate * self.tokens_per_step:,.0f} tokens/s")
        self.bar.set_postfix_str(", ".join(words), refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        self.bar.close()


class TensorBoard:
    """Scalars for TensorBoard; does nothing when it is switched off or on other ranks than the first."""

    def __init__(self, directory: Path, first_step: int, on: bool) -> None:
        self.writer: Any = None
        if on:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what an interrupted run wrote after its last checkpoint
            self.writer = SummaryWriter(str(directory), purge_step=first_step)

    def scalars(self, prefix: str, values: dict[str, float], step: int) -> None:
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _gate_maps(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """(layer number, module) of everything that maps projections to gates, in order."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "gate_map", None), nn.Module)]
    return [(int(layer.layer_idx or 0), layer.gate_map) for layer in layers]  # type: ignore[arg-type, misc]


def _summary(gates: Any, clamp: float | None) -> dict[str, float]:
    """Means, and the share of values that are not finite (after exp for logs: a log of -inf is a legal zero)."""
    summary: dict[str, float] = {}
    for name, gate in gates._asdict().items():
        if gate is None:
            continue
        value = gate.detach().float()
        value = value.exp() if name.startswith("log_") else value
        summary[name.removeprefix("log_")] = float(value.mean())
        broken = float((~torch.isfinite(value)).float().mean())
        if broken:
            summary[f"{name.removeprefix('log_')}_not_finite"] = broken
    if clamp is not None:
        summary["mu_at_clamp"] = float((gates.log_mu.detach() <= clamp).float().mean())
    return summary


@contextmanager
def recorded_gates(model: nn.Module) -> Iterator[dict[int, dict[str, float]]]:
    """Collects a summary per layer of every gate map that runs inside the block."""
    statistics: dict[int, dict[str, float]] = {}
    handles = []
    for layer, gate_map in _gate_maps(model):
        clamp = getattr(getattr(gate_map, "settings", None), "min_log_mu", None)

        def hook(module: nn.Module, inputs: Any, gates: Any, layer: int = layer, clamp: float | None = clamp) -> None:
            statistics[layer] = _summary(gates, clamp)

        handles.append(gate_map.register_forward_hook(hook))
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def measure(model: nn.Module, input_ids: Tensor) -> list[dict[str, float]]:
    """One dict per layer with gates: `layer`, means, and the root-mean-square of S and M after the text.

    `input_ids` is `[1, T]`. The model's mode is put back; no random number is drawn.
    """
    was_training = model.training
    model.eval()
    try:
        with recorded_gates(model) as statistics:
            outputs = model(input_ids=input_ids, use_cache=True)
    finally:
        model.train(was_training)
    for layer, cache in enumerate(getattr(outputs.past_key_values, "layers", ())):
        states = getattr(cache, "recurrent_states", None)
        if not states:
            continue
        entry = statistics.setdefault(layer, {})
        for number, name in enumerate(("state_rms", "momentum_rms")):
            if states.get(number) is not None:
                entry[name] = float(states[number].float().square().mean().sqrt())
    return [{"layer": layer, **values} for layer, values in sorted(statistics.items())]


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; the message names step, layer and gate statistics."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)  # both, so that the error survives the way out of a worker process
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


@torch.no_grad()
def _first_bad_module(model: nn.Module, inputs: dict[str, Any]) -> tuple[str | None, dict[int, dict[str, float]]]:
    """Run the batch again and watch: the first module whose output is not finite, and the gate statistics."""
    first: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            numbers = isinstance(value, torch.Tensor) and value.is_floating_point()
            if not first and numbers and not bool(torch.isfinite(value).all()):
                first.append(name)

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if name and not any(True for _ in m.children())]
    layers = [(name, m) for name, m in model.named_modules() if re.search(r"layers\.\d+(\.attn)?$", name)]
    handles = [module.register_forward_hook(watch(name)) for name, module in [*leaves, *layers]]
    try:
        with recorded_gates(model) as gates:
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return (first[0] if first else None), gates


def _bad_gradients(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]


def explain(model: nn.Module, inputs: dict[str, Any], step: int, loss: float, grad_norm: float) -> str:
    """One line for the user: step, loss, gradient norm, the layer, and its gates."""
    gradients = _bad_gradients(model)
    module, gates = _first_bad_module(model, inputs)
    place = f"first bad output in {module}" if module else "all outputs are finite, only gradients are not"
    if gradients:
        shown = ", ".join(gradients[-3:])
        place += f"; {len(gradients)} parameters with bad gradients, nearest to the loss: {shown}"
    text = f"step {step}: loss {loss}, gradient norm {grad_norm}; {place}"
    number = re.search(r"layers\.(\d+)", module or (gradients[-1] if gradients else ""))
    chosen = {int(number[1]): gates[int(number[1])]} if number and int(number[1]) in gates else gates
    for layer, values in sorted(chosen.items())[:4]:
        text += f"; gates of layer {layer}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    return text

"""NaN and infinity: find out where they came from, and say it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from mdn.training.gate_statistics import recorded_gates


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; the message names step, layer and gate statistics."""


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

"""What the gates do: means of alpha, mu, beta and eta per layer, the share of log mu at its clamp, and state norms.

Read from one forward pass over a fixed piece of held-out text, so numbers of different steps and runs compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _gate_maps(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """(layer number, module) of everything that maps projections to gates, in order."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "gate_map", None), nn.Module)]
    return [(int(layer.layer_idx or 0), layer.gate_map) for layer in layers]  # type: ignore[arg-type, misc]


def _summary(gates: Any, clamp: float | None) -> dict[str, float]:
    """Means, and the share of values that are not finite (after exp for logs: a log of -inf is a legal zero)."""
    summary: dict[str, float] = {}
    for name, gate in gates._asdict().items():
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

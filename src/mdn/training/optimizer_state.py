"""The optimiser's state as one process would save it, however the parameters are split.

A run with tensor parallelism groups its parameters differently and holds parts of them. Its checkpoints have the whole
tensors, in the order of a run without it: parameters with weight decay, then those without, each in the model's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mdn.parallel.tensor import part_of, whole_of

CANONICAL_GROUPS = 2


def _canonical_groups(model: nn.Module, decayed: list[str]) -> tuple[list[str], list[str]]:
    """Names of the parameters with and without weight decay."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    chosen = set(decayed)
    return [name for name in names if name in chosen], [name for name in names if name not in chosen]


def _own_order(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Names in the order in which this optimiser numbers its parameters."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def whole_state(optimizer: Optimizer, model: nn.Module, decayed: list[str]) -> dict[str, Any]:
    """A state dict for the canonical order. A collective: every rank calls it."""
    own, order = optimizer.state_dict(), _own_order(optimizer, model)
    entries = {order[i]: {key: whole_of(x) for key, x in entry.items()} for i, entry in own["state"].items()}
    options = {order[i]: {**group, "params": []} for group in own["param_groups"] for i in group["params"]}
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for names in _canonical_groups(model, decayed):
        first = len(numbers)
        numbers |= {name: first + i for i, name in enumerate(names)}
        like = options[names[0]] if names else next(iter(options.values())) | {"weight_decay": 0.0}
        groups.append(like | {"params": [numbers[name] for name in names]})
    return {"state": {numbers[name]: entry for name, entry in entries.items()}, "param_groups": groups}


def regrouped_schedule(saved: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """A scheduler's state for another number of groups, which all have the same learning rate."""
    per_group = ("base_lrs", "_last_lr", "lr_lambdas")
    return {key: [value[0]] * groups if key in per_group else value for key, value in saved.items()}


def load_whole_state(optimizer: Optimizer, model: nn.Module, decayed: list[str], saved: Mapping[str, Any]) -> None:
    """The parts that this rank holds, from a state dict in the canonical order."""
    parameters = dict(model.named_parameters())
    canonical = [name for names in _canonical_groups(model, decayed) for name in names]
    number_of = {name: i for i, name in enumerate(canonical)}
    options = {i: group for group in saved["param_groups"] for i in group["params"]}
    own, order = optimizer.state_dict(), _own_order(optimizer, model)
    for group in own["param_groups"]:
        theirs = options[number_of[order[group["params"][0]]]]
        group |= {key: value for key, value in theirs.items() if key != "params"}
    own["state"] = {}
    for i, name in enumerate(order):
        entry = saved["state"].get(number_of[name])
        if entry is not None:
            like = parameters[name]
            own["state"][i] = {key: part_of(x, like) if x.shape == like.shape else x for key, x in entry.items()}
    optimizer.load_state_dict(own)

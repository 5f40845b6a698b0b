"""Decoding without the layers' Python: one step of all layers is recorded and replayed (``mdn.ops.cpu.program``).

The recording is made from the layers themselves, at the second step that continues a cache, and belongs to that cache.
It is replayed as long as everything it was made from is where it was: the weights, the states of the cache, the
modules (and no hook is registered on them), the number of threads, MDN_BACKEND. Otherwise the layers run as usual, and
this cache gets no other recording: beam search moves its states at every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from mdn.ops.backends import environment_backend
from mdn.ops.cpu.huge_pages import prefer_huge_pages
from mdn.ops.cpu.program import RecordedProgram, record
from mdn.ops.fused import is_native

FIRST_STEP = object()
"""one step has been done: whatever is prepared at a first use is prepared, and the next one is recorded"""
_programs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""by cache: FIRST_STEP, a DecodeProgram, or None (no recording for this one)"""


def run_step(model: nn.Module, layers: Callable[[Tensor], Tensor], x: Tensor, cache: Any) -> Tensor:
    """``layers(x)`` for a decode step of ``model`` that continues ``cache``, by replaying it if possible."""
    if cache not in _programs:
        _programs[cache] = FIRST_STEP
        return layers(x)
    if _programs[cache] is FIRST_STEP:
        _programs[cache] = None
        if _may_change_unseen(model) or _has_inference_tensors(model, cache):
            return layers(x)
        # In inference mode the recorder sees operations such as ``contiguous`` whole and takes their copies for views,
        # and the memory of the program could be used in no other mode.
        with torch.inference_mode(False):
            y, recorded = record(layers, x)
            if recorded is not None:
                _programs[cache] = DecodeProgram(recorded, model, x, cache)
        return y
    program: DecodeProgram | None = _programs[cache]
    if program is None:
        return layers(x)
    if not program.is_of(model, x):
        _programs[cache] = None
        return layers(x)
    return program.recorded.replay(x)


def can_record(x: Tensor, cache: Any) -> bool:
    """Whether x ``[B, 1, D]`` continues held states, without gradients, where the native kernel computes."""
    if torch.is_grad_enabled() or x.shape[1] != 1 or not is_native(x) or torch.is_autocast_enabled("cpu"):
        return False
    return all(getattr(layer, "has_recurrent_state", {}).get(0) for layer in cache.layers)


def _may_change_unseen(model: nn.Module) -> bool:
    """Whether some module can compute something else while all that ``DecodeProgram`` watches stays: PEFT switches
    adapters by a flag, and where ``forward`` was replaced, as accelerate does, weights may come and go."""
    parts = (module for module in model.modules() if module is not model)  # transformers' models have the method, too
    return "forward" in vars(model) or any(
        hasattr(type(part), "disable_adapters") or "forward" in vars(part) for part in parts
    )


def _has_inference_tensors(model: nn.Module, cache: Any) -> bool:
    """Whether weights or states were made in inference mode, whose rules then hold for them everywhere."""
    states = (x for layer in cache.layers for x in (*layer.conv_states.values(), *layer.recurrent_states.values()))
    tensors = itertools.chain(model.parameters(), model.buffers(), states)
    return any(x is not None and x.is_inference() for x in tensors)


class DecodeProgram:
    """A recorded step, and what must not have changed since."""

    def __init__(self, recorded: RecordedProgram, model: nn.Module, x: Tensor, cache: Any):
        self.recorded, self.model = recorded, ref(model)
        self.facts = _facts(x)
        self.hooks: list[Any] = []
        self.tensors: list[tuple[dict[Any, Any], Any, Tensor, int]] = []
        self.modules: list[tuple[dict[str, Any], str, nn.Module]] = []
        for module in model.modules():
            self.hooks += [module._forward_hooks, module._forward_pre_hooks]
            self.modules += [(module._modules, name, child) for name, child in module.named_children()]
            self._watch(module._parameters)
            self._watch(module._buffers)
        for layer in cache.layers:
            self._watch(layer.conv_states)
            self._watch(layer.recurrent_states)
        for _, _, tensor, _ in self.tensors:  # weights and states: every step reads all of them
            prefer_huge_pages(tensor)

    def _watch(self, tensors: dict[Any, Any]) -> None:
        self.tensors += [(tensors, name, x, x.data_ptr()) for name, x in tensors.items() if x is not None]

    def is_of(self, model: nn.Module, x: Tensor) -> bool:
        if self.model() is not model or self.facts != _facts(x) or any(self.hooks):
            return False
        for modules, name, module in self.modules:
            if modules.get(name) is not module:
                return False
        for tensors, key, tensor, address in self.tensors:
            if tensors.get(key) is not tensor or tensor.data_ptr() != address:
                return False
        return True


def _facts(x: Tensor) -> tuple[Any, ...]:
    listening = bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
    return x.shape, x.dtype, torch.get_num_threads(), environment_backend(), listening

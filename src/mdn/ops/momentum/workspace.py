"""Scratch tensors that the torch backend keeps between calls.

Megabyte temporaries that are freed go back to the system, and every page of them faults in again at the next use; on a
CPU that costs more than many of the products. So each temporary has a name, and its memory is used again by the next
group of chunks and the next call of the same thread. A name holds one tensor at a time: taking it again ends the
previous use.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

KEPT_BYTES = 128 * 2**20
"""A thread that needed more than this in one call gives everything back after it."""

_of_this_thread = threading.local()


class Workspace:
    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._blocks: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor with arbitrary content."""
        view = self._views.get((name, shape))
        if view is None:
            view = self._views[name, shape] = self._block(name, math.prod(shape))[: math.prod(shape)].view(shape)
        return view

    def _block(self, name: str, count: int) -> Tensor:
        block = self._blocks.get(name)
        if block is None or len(block) < count:
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
                block = self._blocks[name] = torch.empty(count, dtype=self.dtype, device=self.device)
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
        return block

    def end_call(self) -> None:
        """Give the memory back if it is too much to keep."""
        if sum(block.nbytes for block in self._blocks.values()) > KEPT_BYTES or len(self._views) > 512:
            self.forget()

    def forget(self) -> None:
        self._blocks.clear()
        self._views.clear()


def workspace_for(device: torch.device, dtype: torch.dtype) -> Workspace:
    """This thread's own on a CPU. Other devices have caching allocators, and streams that must not share memory."""
    if device.type != "cpu":
        return Workspace(device, dtype)
    kept = _of_this_thread.__dict__.setdefault("workspaces", {})
    return kept.setdefault(dtype, Workspace(device, dtype))

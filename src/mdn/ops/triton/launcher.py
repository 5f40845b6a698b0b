"""The one place where kernels are started, and a way to watch it.

`mdn bench kernels` counts launches and compiles for other targets from what is really launched: `watch_launches`
hands every launch to an observer instead of a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mdn.ops.triton.tiles import Tile


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments by name and its tile."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    tile: Tile


def _run(launch: Launch) -> None:
    tensor = next(value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    # Triton launches on the current device, which need not be the tensors' own.
    guard = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with guard:
        launch.kernel[launch.grid](**launch.arguments, num_warps=launch.tile.warps, num_stages=launch.tile.stages)


_observer: Callable[[Launch], None] = _run


def launch(kernel: Any, grid: tuple[int, ...], tile: Tile, **arguments: Any) -> None:
    """Start a kernel; an empty grid (no tokens) starts nothing."""
    if 0 not in grid:
        _observer(Launch(kernel, grid, arguments, tile))


@contextlib.contextmanager
def watch_launches(run: bool) -> Iterator[list[Launch]]:
    """Collect the launches made inside the block; ``run`` says whether they also happen."""
    global _observer
    seen: list[Launch] = []

    def observe(item: Launch) -> None:
        seen.append(item)
        if run:
            _run(item)

    before, _observer = _observer, observe
    try:
        yield seen
    finally:
        _observer = before

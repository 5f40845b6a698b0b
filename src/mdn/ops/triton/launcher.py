"""The one place where kernels are started, and a way to stand in for it.

`mdn bench kernels` counts launches and bytes and compiles for other GPUs from what is really launched:
`intercept_launches` hands every launch to another function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
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

    @property
    def name(self) -> str:
        """The name used in tables and in `tiles`."""
        return kernel_name(self.kernel)

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told besides the arguments. Fused multiply-add is asked for: its default is changing."""
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": True}


def kernel_name(kernel: Any) -> str:
    return kernel.__name__.removesuffix("_kernel")


def run_launch(launch: Launch) -> None:
    """Start the kernel on the device of its tensors."""
    tensor = next(value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    # Triton launches on the current device, which need not be the tensors' own.
    guard = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with guard:
        launch.kernel[launch.grid](**launch.arguments, **launch.options)


_handler: Callable[[Launch], None] = run_launch


def launch(kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: Mapping[str, Any]) -> None:
    """Start a kernel with those of the arguments that its parameters name; an empty grid starts nothing."""
    if 0 not in grid:
        _handler(Launch(kernel, grid, {name: arguments[name] for name in kernel.arg_names}, tile))


@contextlib.contextmanager
def intercept_launches(handler: Callable[[Launch], None]) -> Iterator[None]:
    """Inside the block, launches go to ``handler``, which may call `run_launch`."""
    global _handler
    before, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = before

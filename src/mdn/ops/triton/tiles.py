"""Tile sizes, warps and pipeline stages: one fixed choice per kernel, by K, operand width and GPU family.

There is no autotuning, so nothing is tuned again for another length or batch, and a run is the same run every time.
The choices come from the resources that `mdn bench kernels` reads off, not from timings; no kernel has run on a GPU.
At K <= 128 nothing spills on sm_80 and sm_90; at K = 256 some kernels spill, and all fit the shared memory of an H100
block. docs/kernels.md has the figures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_assumed_target: str | None = None


@contextlib.contextmanager
def assume_target(name: str) -> Iterator[None]:
    """Choose tiles and precisions as for another GPU (sm_90, gfx942): compiling for it needs no such device."""
    global _assumed_target
    before, _assumed_target = _assumed_target, name
    try:
        yield
    finally:
        _assumed_target = before


def target_of(device: torch.device) -> str:
    """The architecture that kernels for this device are built for; the interpreter counts as sm_80."""
    if _assumed_target is not None:
        return _assumed_target
    return _architecture(device) if device.type == "cuda" else "sm_80"


@functools.cache
def _architecture(device: torch.device) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Tile:
    """V columns per program (or per loop turn), warps of a program, stages of the load pipeline."""

    value_block: int
    warps: int
    stages: int


def power_of_two(width: int) -> int:
    """The padded width: tl.dot wants powers of two of at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def choose_tile(kernel: str, key_dim: int, value_dim: int, itemsize: int, target: str, given_p: bool = False) -> Tile:
    """The tile of a kernel for operands of ``itemsize`` bytes on a GPU."""
    changes: dict[str, tuple[Tile, Tile]] = {}
    if itemsize > 2:
        changes = _FLOAT32_OPERANDS
    else:
        changes = next((found for family, found in _FAMILIES.items() if target.startswith(family)), changes)
    large = power_of_two(key_dim) > 128
    tile = changes.get(kernel, _TILES[kernel])[large]
    # A third [C, K] operand: at K > 128 two stages of it do not fit an H100 block.
    stages = 1 if given_p and large else tile.stages
    return Tile(min(tile.value_block, power_of_two(value_dim)), tile.warps, stages)


# For each kernel: the choice for K <= 128, then for K > 128 (states twice as tall).
_TILES = {
    # No V. The [C, C] float32 matrices fill the registers: 8 warps share them.
    "prepare": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "backward_gates": (Tile(16, 8, 1), Tile(16, 8, 1)),
    # S and M stay in registers beside their copies as operands: 16 columns.
    "forward_states": (Tile(16, 4, 2), Tile(16, 8, 1)),
    # Only two products a chunk: 32 columns fit.
    "rebuild_states": (Tile(32, 4, 2), Tile(32, 8, 1)),
    # dS and dM, but no copies of them as operands for long.
    "backward_states": (Tile(32, 8, 2), Tile(16, 8, 1)),
    # One [C, C] sum in a loop over V.
    "backward_scores": (Tile(32, 8, 2), Tile(32, 8, 1)),
    # Two to four [C, K] sums live at once.
    "backward_inputs": (Tile(32, 8, 1), Tile(32, 8, 1)),
    # Bandwidth only: 128-byte rows, many small programs.
    "decode": (Tile(32, 4, 1), Tile(32, 8, 1)),
}
# What differs on a family of GPUs, for 16-bit operands.
_FAMILIES = {
    # Hopper's and data-centre Blackwell's tensor cores read operands from shared memory, of which they have more: at
    # K = 256 a second stage keeps loads out of the registers.
    "sm_9": {"backward_states": (Tile(32, 8, 2), Tile(16, 8, 2))},
    # The same; and with 4 warps forward_states spills there at K <= 128.
    "sm_10": {"forward_states": (Tile(16, 8, 2), Tile(16, 8, 1)), "backward_states": (Tile(32, 8, 2), Tile(16, 8, 2))},
    # 64 KB of shared memory: a second stage only where it is small. With 4 warps a CDNA thread has 512 registers.
    "gfx": {"forward_states": (Tile(16, 4, 2), Tile(16, 4, 1)), "backward_states": (Tile(16, 4, 1), Tile(16, 8, 1))},
}
# float32 operands: twice the bytes and, in tf32x3, three times the products. Smaller tiles, no second pipeline stage;
# they spill all the same, on sm_80 far less with 8 warps than with 4. Train with 16-bit inputs; float32 is for checks.
_FLOAT32_OPERANDS = {
    "forward_states": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "rebuild_states": (Tile(32, 4, 1), Tile(16, 8, 1)),
    "backward_states": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "backward_scores": (Tile(32, 8, 1), Tile(32, 8, 1)),
    "backward_inputs": (Tile(32, 8, 1), Tile(16, 8, 1)),
}

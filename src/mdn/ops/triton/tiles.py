"""Tile sizes, warps and pipeline stages: one fixed choice per kernel, by K and operand width.

There is no autotuning, so nothing is tuned again for another length or batch, and a run is the same run every time.
The choices come from the resources that `mdn bench kernels` reads off: no spills at K <= 128 and no more shared memory
than an H100 block has at K = 256.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """V columns per program (or per loop turn), warps of a program, stages of the load pipeline."""

    value_block: int
    warps: int
    stages: int


def power_of_two(width: int) -> int:
    """The padded width: tl.dot wants powers of two of at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def choose_tile(kernel: str, key_dim: int, value_dim: int, itemsize: int) -> Tile:
    tile = (_WIDE if itemsize > 2 else _NARROW)[kernel][power_of_two(key_dim) > 128]
    return Tile(min(tile.value_block, power_of_two(value_dim)), tile.warps, tile.stages)


# For each kernel: the choice for K <= 128, then for K > 128 (states twice as tall).
_NARROW = {
    # No V. The [C, C] float32 matrices fill the registers: 8 warps share them.
    "prepare": (Tile(16, 4, 1), Tile(16, 8, 1)),
    # S and M stay in registers, so 32 columns: 64 registers a thread. One stage less when K doubles the tiles.
    "forward_states": (Tile(32, 4, 2), Tile(32, 8, 1)),
    "rebuild_states": (Tile(32, 4, 3), Tile(32, 8, 2)),
    "backward_states": (Tile(32, 4, 2), Tile(32, 8, 1)),
    "backward_scores": (Tile(64, 8, 2), Tile(64, 8, 2)),
    # Two to four [C, K] sums live at once.
    "backward_inputs": (Tile(64, 8, 2), Tile(32, 8, 2)),
    "backward_gates": (Tile(16, 8, 1), Tile(16, 8, 1)),
    # Bandwidth only: 128-byte rows, many small programs.
    "decode": (Tile(32, 4, 1), Tile(32, 8, 1)),
}
# float32 operands: twice the bytes and three times the products.
_WIDE = {
    "prepare": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "forward_states": (Tile(16, 4, 1), Tile(16, 8, 1)),
    "rebuild_states": (Tile(32, 4, 1), Tile(16, 8, 1)),
    "backward_states": (Tile(16, 4, 1), Tile(16, 8, 1)),
    "backward_scores": (Tile(32, 8, 1), Tile(32, 8, 1)),
    "backward_inputs": (Tile(32, 8, 1), Tile(16, 8, 1)),
    "backward_gates": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "decode": (Tile(32, 4, 1), Tile(32, 8, 1)),
}

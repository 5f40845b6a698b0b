"""Tile sizes, warps and pipeline stages: one fixed choice per kernel, by K, operand width and GPU family.

There is no autotuning, so nothing is tuned again for another length, and a run is the same run every time. The choices
come from machine code (static cycles, blocks per SM, spills: `mdn bench kernels`), not from timings; no kernel has run
on a GPU. docs/kernel-tables.md has the figures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

FULL_GPU = 1024
"""sequences times value heads of a batch that fills a GPU: tiles are as wide as they get"""
_assumed_target: str | None = None
_assumed_heads: int | None = None


@contextlib.contextmanager
def assume_target(name: str) -> Iterator[None]:
    """Choose tiles and precisions as for another GPU (sm_90, gfx942): compiling for it needs no such device."""
    global _assumed_target
    before, _assumed_target = _assumed_target, name
    try:
        yield
    finally:
        _assumed_target = before


@contextlib.contextmanager
def assume_heads(count: int | None) -> Iterator[None]:
    """Choose tiles as for this many sequences times value heads, whatever the tensors say; None: as they say."""
    global _assumed_heads
    before, _assumed_heads = _assumed_heads, count
    try:
        yield
    finally:
        _assumed_heads = before


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


def choose_chunk_size(wanted: int, key_dim: int, target: str) -> int:
    """Tokens in a chunk: as many as wanted, unless a block of this GPU has too little shared memory for them. With
    K > 128 `forward_states` takes 106,496 bytes for 64 tokens and 55,296 for 32; consumer GPUs have 101,376."""
    return min(wanted, 32) if power_of_two(key_dim) > 128 and target.startswith(_LITTLE_SHARED_MEMORY) else wanted


def choose_tile(
    kernel: str,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    target: str,
    *,
    chunk_size: int = 64,
    given_p: bool = False,
    grouped: bool = False,
    heads: int = FULL_GPU,
) -> Tile:
    """The tile of a kernel for operands of ``itemsize`` bytes and ``heads`` sequences times value heads, ``grouped`` if
    several value heads share a key head."""
    large = power_of_two(key_dim) > 128
    heads = heads if _assumed_heads is None else _assumed_heads
    if itemsize > 2:
        table = _FLOAT32_OPERANDS
    else:
        table = next((found for family, found in _FAMILIES.items() if target.startswith(family)), _TILES)
    tile = table.get(kernel, _TILES[kernel])[large]
    columns, warps = _NARROWEST.get(kernel, (tile.value_block, tile.warps))
    if tile.value_block > columns and heads * value_dim < 2 * _FEW_PROGRAMS * tile.value_block:
        # Too few programs to fill the GPU: narrower tiles make more of them, and each turn of a scan is shorter.
        tile = replace(tile, value_block=max(columns, tile.value_block // 2), warps=max(warps, tile.warps // 2))
    if given_p and power_of_two(key_dim) > 64:
        # A third [C, K] operand takes the shared memory of one stage. With K <= 128 two stages fit nevertheless.
        tile = replace(tile, stages=max(1 if large else min(2, tile.stages), tile.stages - 1))
    if (kernel == "forward_states" and chunk_size < 64) or (kernel == "backward_inputs" and grouped):
        tile = replace(tile, stages=min(2, tile.stages))  # a third one spills
    return replace(tile, value_block=min(tile.value_block, power_of_two(value_dim)))


# V columns and warps of the narrowest tiles: a scan's products want 16 columns, a decoding step 32 bytes of a row.
_NARROWEST = {"forward_states": (16, 4), "rebuild_states": (16, 4), "backward_states": (16, 4), "decode": (8, 1)}
_FEW_PROGRAMS = 128
_LITTLE_SHARED_MEMORY = ("sm_86", "sm_89", "sm_12")

# For each kernel: the choice for K <= 128, then for K > 128 (states twice as tall).
_TILES = {
    # A row of a [C, C] matrix is one number per thread: two warps hold it, more would only repeat the work.
    "prepare": (Tile(16, 2, 2), Tile(16, 2, 2)),
    "backward_gates": (Tile(16, 2, 1), Tile(16, 2, 1)),
    # Scans with one stage: a second one spills, and two blocks of an SM cover each other's loads.
    "forward_states": (Tile(16, 4, 1), Tile(16, 8, 1)),
    # Looks at one row of o and, as a rule, is done.
    "contain": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "rebuild_states": (Tile(32, 4, 2), Tile(32, 8, 1)),
    "backward_states": (Tile(16, 4, 1), Tile(16, 8, 1)),
    "backward_scores": (Tile(64, 4, 2), Tile(64, 4, 2)),
    "backward_inputs": (Tile(32, 8, 2), Tile(32, 8, 1)),
    # Bandwidth and latency: programs of one warp sum over K without shared memory and without barriers.
    "decode": (Tile(16, 1, 1), Tile(8, 1, 1)),
}
# What differs on a family of GPUs, for 16-bit operands.
_FAMILIES: dict[str, dict[str, tuple[Tile, Tile]]] = {
    # Tensor cores read their operands from shared memory, of which there is more. With three stages a copy has a whole
    # turn of the loop to arrive; with two it is waited for at once.
    "sm_9": {
        "forward_states": (Tile(32, 8, 3), Tile(32, 8, 2)),
        "rebuild_states": (Tile(32, 4, 3), Tile(32, 8, 2)),
        "backward_states": (Tile(32, 8, 3), Tile(32, 8, 2)),
        "backward_scores": (Tile(64, 4, 3), Tile(64, 4, 3)),
        "backward_inputs": (Tile(64, 8, 3), Tile(32, 8, 2)),
    },
    # AMD's wavefronts have 64 lanes: four of them are as many threads as eight warps, and may use twice the registers.
    "gfx9": {
        "forward_states": (Tile(16, 4, 1), Tile(16, 4, 1)),
        "contain": (Tile(16, 4, 1), Tile(16, 4, 1)),
        "backward_states": (Tile(16, 4, 1), Tile(16, 4, 1)),
    },
}
# float32 operands: twice the bytes and, in tf32x3, three times the products. Smaller tiles, no second pipeline stage;
# they spill all the same. Train with bfloat16 inputs; float32 and float16 are for checks.
_FLOAT32_OPERANDS = {
    "prepare": (Tile(16, 4, 1), Tile(16, 4, 1)),
    "forward_states": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "rebuild_states": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "backward_states": (Tile(16, 8, 1), Tile(16, 8, 1)),
    "backward_scores": (Tile(32, 8, 1), Tile(32, 8, 1)),
    "backward_inputs": (Tile(32, 8, 1), Tile(16, 8, 1)),
}

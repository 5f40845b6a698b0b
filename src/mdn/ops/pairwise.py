"""Runs of 1, 2, 4, ... tokens, merged in pairs: the geometry that all rules with a decay per key dimension share.

A decay per key dimension cannot be taken out of an inner product, and splitting the decay between two tokens as
exp(G_i) exp(-G_j) overflows. So the C tokens of a chunk (a power of two) are seen as runs of ``block`` tokens in pairs,
for block = 1, 2, 4, ..., C / 2. At every level the later run of a pair meets the earlier one, and the border between
them is the anchor: what the later tokens read decays from there on, what the earlier ones wrote up to it. Every pair of
two different tokens meets at exactly one level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """One level. All methods return views."""

    block: int

    def earlier(self, x: Tensor) -> Tensor:
        """``[..., C, D]`` to the earlier runs of all pairs ``[..., pairs, block, D]``."""
        return in_pairs(x, -2, self.block)[..., 0, :, :]

    def later(self, x: Tensor, rows: int = 1) -> Tensor:
        """The later runs; with several ``rows`` per token ``[..., C rows, D]`` to ``[..., pairs, block rows, D]``."""
        return in_pairs(x, -2, self.block * rows)[..., 1, :, :]

    def between(self, x: Tensor, rows: int = 1) -> Tensor:
        """The parts ``[..., pairs, block rows, block]`` of ``[..., C rows, C]`` where a pair's later rows meet its
        earlier columns."""
        grid = in_pairs(in_pairs(x, -1, self.block), -4, self.block * rows)  # [..., pairs, 2, block, pairs, 2, block]
        return grid[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def levels(size: int) -> Iterator[Pairs]:
    """Together with the diagonal, their ``between`` parts tile the lower triangle of ``[C, C]``."""
    block = 1
    while block < size:
        yield Pairs(block)
        block *= 2


def in_pairs(x: Tensor, dim: int, block: int) -> Tensor:
    """A view in which ``dim`` is (pairs, 2, block)."""
    return torch.unflatten(x, dim, (-1, 2, block))


def next_power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()

"""Cut sequences into chunks of C tokens, in the order in which a scan over chunks needs them.

A batch of rows and a pack of sequences become the same thing: `[chunks, H, C, ...]`, with all first chunks before all
second chunks and so on, longest sequence first. So step i of a scan is one slice of chunks, and the states still
active in it are a prefix. Missing tokens are zeros: no key, no write, a decay of one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries


class ChunkLayout:
    """`split` cuts `[B, T, H, ...]` into `[chunks, H, C, ...]`; `join` puts outputs back.

    `steps` holds one (first chunk, number of chunks) pair per step of the scan. `order[r]` is the sequence of rank r;
    None when ranks are sequences.
    """

    def __init__(self, steps: list[tuple[int, int]], chunk_size: int):
        self.steps = steps
        self.chunk_size = chunk_size

    def split(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def join(self, chunks: Tensor) -> Tensor:
        raise NotImplementedError

    def rank_states(self, state: Tensor) -> Tensor:
        """States of sequences `[N, ...]` in the order of the scan."""
        return state

    def unrank_states(self, state: Tensor) -> Tensor:
        return state


class RowLayout(ChunkLayout):
    """Every row of the batch is one sequence of T tokens."""

    def __init__(self, batch: int, time: int, chunk_size: int):
        self.batch, self.time, self.count = batch, time, -(-time // chunk_size)
        super().__init__([(i * batch, batch) for i in range(self.count)], chunk_size)

    def split(self, x: Tensor) -> Tensor:
        padding = self.count * self.chunk_size - self.time
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, padding])
        x = x.reshape(self.batch, self.count, self.chunk_size, *x.shape[2:])
        return x.movedim(0, 1).transpose(2, 3).reshape(-1, x.shape[3], self.chunk_size, *x.shape[4:])

    def join(self, chunks: Tensor) -> Tensor:
        x = chunks.reshape(self.count, self.batch, *chunks.shape[1:]).transpose(2, 3).movedim(0, 1)
        return x.reshape(self.batch, self.count * self.chunk_size, *x.shape[3:])[:, : self.time]


class PackLayout(ChunkLayout):
    """One row holds sequences end to end; the longest comes first in the scan."""

    def __init__(self, offsets: tuple[int, ...], chunk_size: int, device: torch.device):
        lengths = [end - start for start, end in pairwise(offsets)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        counts = [-(-lengths[n] // chunk_size) for n in order]
        steps: list[tuple[int, int]] = []
        firsts: list[int] = []
        ends: list[int] = []
        for i in range(counts[0] if counts else 0):
            active = sum(count > i for count in counts)
            steps.append((len(firsts), active))
            firsts += [offsets[n] + i * chunk_size for n in order[:active]]
            ends += [offsets[n + 1] for n in order[:active]]
        super().__init__(steps, chunk_size)
        total = offsets[-1]
        rows = torch.tensor(firsts, dtype=torch.int64).reshape(-1, 1) + torch.arange(chunk_size)
        inside = rows < torch.tensor(ends, dtype=torch.int64).reshape(-1, 1)
        places = torch.empty(total, dtype=torch.int64)
        places[rows[inside]] = inside.reshape(-1).nonzero().squeeze(-1)
        self.rows = torch.where(inside, rows, total).reshape(-1).to(device)
        self.places = places.to(device)
        self.order = torch.tensor(order, dtype=torch.int64, device=device)
        self.ranks = torch.argsort(self.order)

    def split(self, x: Tensor) -> Tensor:
        with_blank = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])
        return with_blank.index_select(0, self.rows).reshape(-1, self.chunk_size, *x.shape[2:]).transpose(1, 2)

    def join(self, chunks: Tensor) -> Tensor:
        rows = chunks.transpose(1, 2).reshape(-1, chunks.shape[1], *chunks.shape[3:])
        return rows.index_select(0, self.places).unsqueeze(0)

    def rank_states(self, state: Tensor) -> Tensor:
        return state.index_select(0, self.order)

    def unrank_states(self, state: Tensor) -> Tensor:
        return state.index_select(0, self.ranks)


@lru_cache(maxsize=16)
def _pack_layout(offsets: tuple[int, ...], chunk_size: int, device: torch.device) -> PackLayout:
    """Made once for the layers of a model, which share one pack; its indices must outlive an inference mode."""
    with torch.inference_mode(False):
        return PackLayout(offsets, chunk_size, device)


def chunk_layout(x: Tensor, boundaries: SequenceBoundaries | None, chunk_size: int) -> ChunkLayout:
    """The layout of `x` `[B, T, ...]`."""
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
    if boundaries is not None:
        return _pack_layout(boundaries.offsets, chunk_size, x.device)
    while chunk_size > 1 and chunk_size >= 2 * x.shape[1]:
        chunk_size //= 2
    return RowLayout(x.shape[0], x.shape[1], chunk_size)

"""The one way to cut batches and packs into chunks of C tokens.

A batch ``[B, T, ...]`` and a pack ``[1, total, ...]`` are the same thing here: a list of sequences. Chunks of one
sequence follow each other; chunks of different sequences are independent. So the r-th chunks of all sequences form a
*round* that is computed as one batch. Sequences are sorted by length, longest first (the place in that order is a
sequence's *rank*), so that the sequences of a round are a prefix of those of the round before:

    rounds[r] = (first, end)      chunk first + i belongs to the sequence of rank i, for i < end - first

Two ways to use it:

``chunk_scan(x, boundaries, C)`` cuts everything at once, and autograd and compilers can follow. Tails are filled up to
C tokens with zeros, which are neutral: no key, no write, the log of a decay of one.

    scan.split(x)          [B, T, H, ...] -> [chunks, H, C, ...]
    scan.join(chunks)      back; what was filled up is dropped
    scan.rounds            as above
    scan.rank_states(s)    [N, ...] states in the order of ranks;  scan.unrank_states(s) back

``plan_slabs(sequences, C, most, device)`` bounds the work done at once, for code that writes into its own memory. A
``Slab`` is a set of sequences advanced together, its ``groups`` are ``ChunkGroup``s in order: rounds of whole chunks,
at most about ``most`` chunks together, and at the end one round of long tails and one of short ones, each as wide as
its longest tail. Here filled-up places repeat the last token of their sequence; ``group.valid`` tells them apart.

    group.load(x, out, factor, scratch)      [B, T, H, D] -> out [chunks * HV, C, D], times factor
    group.store(chunks, x, factor, scratch)  back

Sequences of equal length (every batch) are cut by views; packs need index tensors, which are cached for the layers of a
model. The cache is bounded in bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

Rounds = tuple[tuple[int, int], ...]


class Sequences(NamedTuple):
    """Where sequences lie in the B * T tokens of a batch or a pack."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: int, time: int, boundaries: SequenceBoundaries | None) -> Sequences:
        if boundaries is None:
            return cls(tuple(row * time for row in range(batch)), (time,) * batch)
        return cls(boundaries.offsets[:-1], boundaries.lengths)


# --------------------------------------------------------------------------------------------------------------- caches

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """The most recently used values, as many as fit into ``limit`` bytes (the last one always does). Threads may share
    it; two that miss the same key at once both make its value."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._values: OrderedDict[Any, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Value], size_of: Callable[[Value], int]) -> Value:
        with self._locked():
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        with torch.inference_mode(False):  # what is made in inference mode could not be used for training later
            value = make()
        with self._locked():
            self._put(key, value, size_of(value))
        return value

    def _put(self, key: Any, value: Value, size: int) -> None:
        if key in self._values:
            self.used -= self._values.pop(key)[1]
        self._values[key] = value, size
        self.used += size
        while self.used > self.limit and len(self._values) > 1:
            self.used -= self._values.popitem(last=False)[1][1]

    def _locked(self) -> AbstractContextManager[Any]:
        """A compiler cannot trace a lock; it runs this code in one thread."""
        return nullcontext() if torch.compiler.is_compiling() else self._lock

    def clear(self) -> None:
        with self._locked():
            self._values.clear()
            self.used = 0


CACHE_BYTES = 16 * 2**20
_slabs: ByteCache[tuple[Slab, ...]] = ByteCache(CACHE_BYTES)
_scans: ByteCache[PackScan] = ByteCache(CACHE_BYTES)
_tables: ByteCache[Tensor] = ByteCache(CACHE_BYTES)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(x.nbytes for x in tensors if x is not None)


# ----------------------------------------------------------------------------------------- everything at once, autograd


class RowScan:
    """Every row of the batch is one sequence of T tokens: ranks are rows, and cutting is reshaping."""

    def __init__(self, batch: int, time: int, chunk_size: int):
        self.batch, self.time, self.chunk_size = batch, time, chunk_size
        self.count = -(-time // chunk_size)  # chunks per row
        self.rounds: Rounds = tuple((r * batch, (r + 1) * batch) for r in range(self.count))

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] to [chunks, H, C, ...]"""
        missing = self.count * self.chunk_size - self.time
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])
        x = x.reshape(self.batch, self.count, self.chunk_size, *x.shape[2:])
        return x.movedim(0, 1).transpose(2, 3).reshape(-1, x.shape[3], self.chunk_size, *x.shape[4:])

    def join(self, chunks: Tensor) -> Tensor:
        """[chunks, H, C, ...] to [B, T, H, ...]"""
        x = chunks.reshape(self.count, self.batch, *chunks.shape[1:]).transpose(2, 3).movedim(0, 1)
        return x.reshape(self.batch, self.count * self.chunk_size, *x.shape[3:])[:, : self.time]

    def rank_states(self, states: Tensor) -> Tensor:
        return states

    def unrank_states(self, states: Tensor) -> Tensor:
        return states


class PackScan:
    """One row holds sequences end to end; the longest comes first in every round."""

    def __init__(self, boundaries: SequenceBoundaries, chunk_size: int):
        device, total, lengths = boundaries.cu_seqlens.device, boundaries.total, boundaries.lengths
        order = _longest_first(range(len(lengths)), lengths)
        chunks, self.rounds = _rounds([-(-lengths[n] // chunk_size) for n in order])
        self.chunk_size = chunk_size
        starts = _on_host([boundaries.offsets[order[rank]] + r * chunk_size for r, rank in chunks])
        ends = _on_host([boundaries.offsets[order[rank] + 1] for _, rank in chunks])
        tokens = starts.reshape(-1, 1) + torch.arange(chunk_size, device="cpu")  # [chunks, C]
        inside = tokens < ends.reshape(-1, 1)
        places = torch.empty(total, dtype=torch.int64, device="cpu")
        places[tokens[inside]] = inside.reshape(-1).nonzero().squeeze(-1)
        # Missing tokens are read from one row of zeros behind the last token.
        self.tokens = torch.where(inside, tokens, total).reshape(-1).to(device)  # [chunks * C]
        self.places = places.to(device)  # [total]: where each token is among [chunks * C]
        self.order = torch.tensor(order, dtype=torch.int64, device=device)
        self.ranks = torch.argsort(self.order)

    def split(self, x: Tensor) -> Tensor:
        """[1, total, H, ...] to [chunks, H, C, ...]"""
        with_zeros = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])
        return with_zeros.index_select(0, self.tokens).reshape(-1, self.chunk_size, *x.shape[2:]).transpose(1, 2)

    def join(self, chunks: Tensor) -> Tensor:
        """[chunks, H, C, ...] to [1, total, H, ...]"""
        rows = chunks.transpose(1, 2).reshape(-1, chunks.shape[1], *chunks.shape[3:])
        return rows.index_select(0, self.places).unsqueeze(0)

    def rank_states(self, states: Tensor) -> Tensor:
        return states.index_select(0, self.order)

    def unrank_states(self, states: Tensor) -> Tensor:
        return states.index_select(0, self.ranks)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tokens, self.places, self.order, self.ranks)


ChunkScan = RowScan | PackScan


def chunk_scan(x: Tensor, boundaries: SequenceBoundaries | None, chunk_size: int) -> ChunkScan:
    """The chunks of ``x`` [B, T, ...]; C is halved while one chunk of half the size would hold the longest sequence."""
    longest = x.shape[1] if boundaries is None else boundaries.max_length
    while chunk_size > 1 and chunk_size >= 2 * longest:
        chunk_size //= 2
    if boundaries is None:
        return RowScan(x.shape[0], x.shape[1], chunk_size)
    key = (boundaries.offsets, chunk_size, boundaries.cu_seqlens.device)
    return _scans.get(key, lambda: PackScan(boundaries, chunk_size), lambda scan: scan.nbytes)


# ----------------------------------------------------------------------------------------- bounded amounts, own memory


class Rectangle(NamedTuple):
    """Chunks that are x[sequences, tokens] of [N, length, ...]: views instead of index tensors."""

    length: int
    sequences: slice
    tokens: slice

    def chunks_of(self, x: Tensor, size: int) -> Tensor:
        """A contiguous [B, T, H, D], viewed as [rounds, sequences, H, 1, C, D]."""
        part = x.view(-1, self.length, *x.shape[-2:])[self.sequences, self.tokens]
        chunks: Tensor = part.unflatten(1, (-1, size))  # [sequences, rounds, C, H, D]
        return chunks.permute(1, 0, 3, 2, 4).unsqueeze(3)


class Gathered(NamedTuple):
    """Chunks anywhere in a pack. Filled-up places repeat the last token of their sequence."""

    tokens: Tensor
    """int64 [chunks * C]: the token at each place"""
    valid: Tensor | None
    """int64: the places that hold a token of their own; None when all do"""
    valid_tokens: Tensor
    """int64: the tokens at those places"""


class ChunkGroup(NamedTuple):
    """Rounds computed together, all chunks C tokens wide."""

    size: int
    """C"""
    rounds: Rounds
    members: Tensor | None
    """int64 [chunks]: the ranks in the slab of the only round's sequences, when they are not the first ones"""
    source: Rectangle | Gathered
    valid: Tensor | None
    """bool [chunks, C]: False where a place was filled up; None when there is none"""

    @property
    def chunks(self) -> int:
        return self.rounds[-1][1]

    def round_sizes(self, heads: int) -> list[int]:
        """Pairs of chunk and head in each round."""
        return [(end - first) * heads for first, end in self.rounds]

    def load(self, x: Tensor, out: Tensor, factor: Tensor | float, scratch: Tensor) -> Tensor:
        """``out`` [chunks * HV, C, D] = factor * the chunks of x [B, T, H, D], contiguous; H divides HV.

        ``factor`` is a number or [chunks * HV, C]; ``scratch`` is flat memory for chunks * C * H * D numbers.
        """
        heads, width = x.shape[-2:]
        if isinstance(self.source, Rectangle):
            source = self.source.chunks_of(x, self.size)
        else:
            rows = x.view(-1, heads * width)
            if x.dtype == scratch.dtype:
                space = scratch[: len(self.source.tokens) * heads * width].view(-1, heads * width)
                torch.index_select(rows, 0, self.source.tokens, out=space)
            else:
                space = rows.index_select(0, self.source.tokens)
            source = space.view(1, self.chunks, self.size, heads, width).transpose(2, 3).unsqueeze(3)
        outer = (*source.shape[:3], len(out) // (self.chunks * heads))  # rounds, sequences, H, HV / H
        if isinstance(factor, float):
            torch.mul(source.to(out.dtype).expand(*outer, -1, -1), factor, out=out.unflatten(0, outer))
        else:
            torch.mul(source, factor.unsqueeze(-1).unflatten(0, outer), out=out.unflatten(0, outer))
        return out

    def store(self, chunks: Tensor, x: Tensor, factor: Tensor | float, scratch: Tensor) -> None:
        """Write factor * chunks [chunks * H, C, D] to their places in x [B, T, H, D], contiguous; as in ``load``."""
        heads, width = x.shape[-2:]
        by = factor if isinstance(factor, float) else factor.unsqueeze(-1)
        if isinstance(self.source, Rectangle):
            target = self.source.chunks_of(x, self.size)
            by = by if isinstance(by, float) else by.reshape(*target.shape[:-1], 1)
            if x.dtype == chunks.dtype:
                torch.mul(chunks.reshape(target.shape), by, out=target)
            else:
                target.copy_(chunks.reshape(target.shape) * by)
            return
        rows = scratch[: chunks.numel()].view(self.chunks, self.size, heads, width)
        by = by if isinstance(by, float) else by.unflatten(0, (-1, heads))
        torch.mul(chunks.unflatten(0, (-1, heads)), by, out=rows.transpose(1, 2))
        rows = rows.view(-1, heads * width)
        if self.source.valid is not None:
            rows = rows.index_select(0, self.source.valid)
        x.view(-1, heads * width).index_copy_(0, self.source.valid_tokens, rows.to(x.dtype))

    @property
    def nbytes(self) -> int:
        indices = () if isinstance(self.source, Rectangle) else self.source
        return _nbytes(self.members, self.valid, *indices)


class Slab(NamedTuple):
    """Sequences advanced together."""

    sequences: tuple[int, ...]
    """by rank in the slab"""
    groups: tuple[ChunkGroup, ...]


def plan_slabs(sequences: Sequences, chunk_size: int, most: int, device: torch.device) -> tuple[Slab, ...]:
    """All sequences that are not empty, in slabs of at most ``most`` and groups of about as many chunks."""
    key = (sequences, chunk_size, most, device)
    return _slabs.get(key, lambda: tuple(_make_slabs(*key)), _slab_bytes)


def _slab_bytes(slabs: tuple[Slab, ...]) -> int:
    # The lengths are in the key: they are the larger part of it all when every sequence has a chunk or less.
    return sum(group.nbytes for slab in slabs for group in slab.groups) + 128 * sum(len(s.sequences) for s in slabs)


def _make_slabs(sequences: Sequences, chunk_size: int, most: int, device: torch.device) -> Iterator[Slab]:
    lengths = sequences.lengths
    order = _longest_first((n for n, length in enumerate(lengths) if length > 0), lengths)
    for i in range(0, len(order), most):
        chosen = order[i : i + most]
        whole = _whole_chunks(chosen, sequences, chunk_size, most, device)
        yield Slab(tuple(chosen), (*whole, *_tails(chosen, sequences, chunk_size, device)))


def _whole_chunks(
    chosen: list[int], sequences: Sequences, chunk_size: int, most: int, device: torch.device
) -> Iterator[ChunkGroup]:
    """Consecutive rounds whose chunks together number at most ``most`` (one round at least)."""
    chunks, rounds = _rounds([sequences.lengths[n] // chunk_size for n in chosen])
    while rounds:
        first = rounds[0][0]
        count = max(1, sum(end - first <= most for _, end in rounds))
        of_group, rounds = rounds[:count], rounds[count:]
        members = chunks[first : of_group[-1][1]]
        starts = [sequences.starts[chosen[rank]] + r * chunk_size for r, rank in members]
        tokens = slice(members[0][0] * chunk_size, (members[-1][0] + 1) * chunk_size)
        source = _rectangle(chosen, sequences, tokens) or _gathered(starts, [chunk_size] * len(starts), device)
        yield ChunkGroup(chunk_size, tuple((i - first, j - first) for i, j in of_group), None, source, None)


def _tails(chosen: list[int], sequences: Sequences, chunk_size: int, device: torch.device) -> Iterator[ChunkGroup]:
    """What is left of each sequence: tails longer than half a chunk, then the others, each as one round."""
    widths = [sequences.lengths[n] % chunk_size for n in chosen]
    for shortest, longest in ((chunk_size // 2 + 1, chunk_size - 1), (1, chunk_size // 2)):
        ranks = [rank for rank, width in enumerate(widths) if shortest <= width <= longest]
        if not ranks:
            continue
        own = [widths[rank] for rank in ranks]
        ends = [sequences.starts[chosen[rank]] + sequences.lengths[chosen[rank]] for rank in ranks]
        members = None if len(ranks) == len(chosen) else torch.tensor(ranks, device=device)
        length = sequences.lengths[chosen[0]]
        source = _rectangle(chosen, sequences, slice(length - own[0], length)) or _gathered(
            [end - width for end, width in zip(ends, own)], own, device
        )
        valid = None
        if min(own) < max(own):
            valid = torch.arange(max(own), device=device) < torch.tensor(own, device=device).unsqueeze(-1)
        yield ChunkGroup(max(own), ((0, len(ranks)),), members, source, valid)


def _rectangle(chosen: list[int], sequences: Sequences, tokens: slice) -> Rectangle | None:
    """The tokens of consecutive sequences, if all sequences have the same length."""
    if len(set(sequences.lengths)) > 1:
        return None
    return Rectangle(sequences.lengths[0], slice(chosen[0], chosen[-1] + 1), tokens)


def _gathered(starts: list[int], widths: list[int], device: torch.device) -> Gathered:
    width = torch.tensor(widths, device=device).unsqueeze(-1)
    place = torch.arange(max(widths), device=device)
    tokens = (torch.tensor(starts, device=device).unsqueeze(-1) + place.minimum(width - 1)).flatten()
    if min(widths) == max(widths):
        return Gathered(tokens, None, tokens)
    valid = (place < width).flatten().nonzero().squeeze(-1)
    return Gathered(tokens, valid, tokens[valid])


# --------------------------------------------------------------------------------------------------------------- shared


def _longest_first(numbers: Iterable[int], lengths: tuple[int, ...]) -> list[int]:
    return sorted(numbers, key=lambda n: -lengths[n])


def _rounds(counts: list[int]) -> tuple[list[tuple[int, int]], Rounds]:
    """(round, rank) of every chunk in order, and the rounds; ``counts`` are the chunks of each rank, falling."""
    chunks: list[tuple[int, int]] = []
    rounds = []
    active = len(counts)
    for r in range(max(counts, default=0)):
        while counts[active - 1] <= r:
            active -= 1
        rounds.append((len(chunks), len(chunks) + active))
        chunks += [(r, rank) for rank in range(active)]
    return chunks, tuple(rounds)


def chunk_indices(boundaries: SequenceBoundaries, chunk_size: int) -> Tensor:
    """int64 [chunks, 2] on the device: (sequence, chunk inside it) in the order of the pack, for kernels that find
    their chunk by number."""
    key = (boundaries.offsets, chunk_size, boundaries.cu_seqlens.device)
    return _tables.get(key, lambda: _make_chunk_indices(*key), lambda table: table.nbytes)


def _make_chunk_indices(offsets: tuple[int, ...], chunk_size: int, device: torch.device) -> Tensor:
    counts = [-(-(end - start) // chunk_size) for start, end in pairwise(offsets)]
    pairs = [(n, c) for n, count in enumerate(counts) for c in range(count)]
    return _on_host(pairs).reshape(-1, 2).to(device, non_blocking=True)


def _on_host(numbers: Sequence[Any]) -> Tensor:
    """int64 in the host's memory, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")

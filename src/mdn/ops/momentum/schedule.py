"""The order in which chunks are computed, and where their tokens lie.

A dense batch and a pack are the same thing here: a list of sequences, each cut into whole chunks of C tokens and a tail
that is shorter. Chunks of one sequence follow each other; chunks of different sequences are independent. So the r-th
chunks of all sequences form a *round* that is computed as one batch, and the chunk-local work of several rounds (a
*group*) is done at once. Groups are kept small enough for the caches: larger batches of products are slower on a CPU.

Sequences are sorted by length, so that each round of whole chunks is a prefix of the previous one. The tails come last,
the long ones and the short ones each in a round of their own that is as wide as its longest tail: only there is
padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries

# Rough figures of a laptop-class processor; only their ratios matter, for the choice of a chunk size.
FLOPS_PER_SECOND = 1.2e11
SECONDS_PER_ROUND = 1e-3  # some fifty calls of torch
SECONDS_PER_STATE_ENTRY = 4e-9  # all passes over one of the 2KV numbers of a chunk
SECONDS_PER_MASK_ENTRY = 4e-8  # the same for one of the C^2 coefficients


@dataclass(frozen=True)
class Group:
    """Rounds computed together."""

    tokens: Tensor
    """int64 [chunks, C]: row of each token in a [B * T, ...] tensor; padding repeats the last token of its sequence"""
    padding: Tensor | None
    """bool [chunks, C]: True where the chunk has no token; None when all chunks are full"""
    rounds: tuple[tuple[int, int], ...]
    """(first chunk, end) of each round in this group; round r covers the first ``end - first`` sequences of the slab"""
    members: Tensor | None = None
    """int64 [chunks]: positions in the slab of the sequences of the only round, when they are not the first ones"""
    block: tuple[int, slice, slice] | None = None
    """when the chunks are the rectangle x[sequences, tokens] of a dense [N, length, ...]: length, sequences, tokens"""
    _rows: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)
    _places: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    def rows(self, heads: int, repeats: int = 1) -> Tensor:
        """int64 [chunks * heads * repeats * C]: rows of a [B * T * heads, D] tensor, each head taken ``repeats``
        times."""
        if (heads, repeats) not in self._rows:
            head = torch.arange(heads, device=self.tokens.device).repeat_interleave(repeats)
            self._rows[heads, repeats] = (self.tokens.unsqueeze(1) * heads + head.unsqueeze(-1)).reshape(-1)
        return self._rows[heads, repeats]

    def states_of(self, slab_states: Tensor, heads: int) -> Tensor:
        """The states [n * heads, ...] that the group works on: those of the slab, or a copy of the members'."""
        return slab_states if self.members is None else slab_states.index_select(0, self._state_rows(heads))

    def put_states(self, states: Tensor, slab_states: Tensor, heads: int) -> None:
        """Write what ``states_of`` gave, and the group has changed, back into the slab's."""
        if self.members is not None:
            slab_states.index_copy_(0, self._state_rows(heads), states)

    def _state_rows(self, heads: int) -> Tensor:
        assert self.members is not None
        return (self.members.unsqueeze(-1) * heads + torch.arange(heads, device=self.members.device)).flatten()

    def kept(self, heads: int) -> Tensor:
        """bool [chunks * heads * C]: where there is a token."""
        assert self.padding is not None
        return ~self.padding.unsqueeze(1).expand(-1, heads, -1).reshape(-1)

    def kept_rows(self, heads: int) -> tuple[Tensor, Tensor]:
        """int64: the places of tokens among [chunks * heads * C], and their rows of a [B * T * heads, D] tensor."""
        if ("kept", heads) not in self._places:
            places = self.kept(heads).nonzero().squeeze(-1)
            self._places["kept", heads] = places
            self._places["kept rows", heads] = self.rows(heads)[places]
        return self._places["kept", heads], self._places["kept rows", heads]


@dataclass(frozen=True)
class Slab:
    """Sequences advanced together (``sequences`` indexes the states), and their groups in order."""

    sequences: tuple[int, ...]
    groups: tuple[Group, ...]


@lru_cache(maxsize=64)
def choose_chunk_size(
    limit: int, lengths: tuple[int, ...], heads: int, key_dim: int, value_dim: int, rows: int, states: int
) -> int:
    """The size from 16 up to ``limit`` with the least estimated time: products on whole chunks, passes over states and
    coefficients, and a cost per round. At most ``rows`` and ``states`` are worked on at once.

    Long chunks waste padding and work that grows with C; short ones mean more rounds and more passes over the states.
    """
    longest = max(lengths, default=1)
    if longest <= 16 or limit <= 16:
        return max(1, min(limit, longest))

    def of_chunk(size: int) -> float:
        products = size * (40 * key_dim * value_dim + size * (12 * value_dim + 16 * key_dim)) / FLOPS_PER_SECOND
        return products + 2 * key_dim * value_dim * SECONDS_PER_STATE_ENTRY + size**2 * SECONDS_PER_MASK_ENTRY

    def seconds(size: int) -> float:
        whole = sum(length // size for length in lengths)
        tails = [length % size for length in lengths if length % size]
        rounds = max(longest // size + 1, (whole + len(tails)) * heads / min(rows // size, states))
        return heads * (whole * of_chunk(size) + sum(map(of_chunk, tails))) + rounds * SECONDS_PER_ROUND

    sizes = [16 * 2**i for i in range(5) if 16 * 2**i < limit]
    return min(longest, min([*sizes, limit], key=seconds))


def sequences_of(
    batch: int, time: int, boundaries: SequenceBoundaries | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first row, length) of every sequence in the flattened [B * T] tokens."""
    if boundaries is None:
        return tuple(range(0, batch * time, time)) if time else (0,) * batch, (time,) * batch
    return boundaries.offsets[:-1], boundaries.lengths


@lru_cache(maxsize=64)
def make_schedule(
    starts: tuple[int, ...], lengths: tuple[int, ...], chunk_size: int, heads: int, most: int, device: torch.device
) -> tuple[Slab, ...]:
    """Slabs of sequences and groups of rounds with at most about ``most`` (chunk, head) pairs each."""
    order = sorted((n for n, length in enumerate(lengths) if length > 0), key=lambda n: -lengths[n])
    per_slab = max(1, most // heads)
    return tuple(
        _make_slab(order[i : i + per_slab], starts, lengths, chunk_size, max(1, most // heads), device)
        for i in range(0, len(order), per_slab)
    )


def _make_slab(
    sequences: list[int],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    chunk_size: int,
    most: int,
    device: torch.device,
) -> Slab:
    counts = [lengths[n] // chunk_size for n in sequences]
    tails = [lengths[n] % chunk_size for n in sequences]
    dense = len(set(lengths)) == 1  # then sequences are consecutive rows of [N, length, ...]
    consecutive = slice(sequences[0], sequences[-1] + 1)
    groups = []
    for first, end in _group_rounds(counts, most):
        chunks: list[int] = []
        rounds = []
        for r in range(first, end):
            active = [n for n, count in zip(sequences, counts) if count > r]
            rounds.append((len(chunks), len(chunks) + len(active)))
            chunks += [starts[n] + r * chunk_size for n in active]
        block = (lengths[0], consecutive, slice(first * chunk_size, end * chunk_size)) if dense else None
        tokens = torch.tensor(chunks, device=device).unsqueeze(-1) + torch.arange(chunk_size, device=device)
        groups.append(Group(tokens, None, tuple(rounds), block=block))
    for positions in _long_and_short(tails, chunk_size):
        begin = torch.tensor([starts[sequences[i]] + counts[i] * chunk_size for i in positions], device=device)
        width = torch.tensor([tails[i] for i in positions], device=device).unsqueeze(-1)
        place = torch.arange(int(width.max()), device=device)
        tokens = begin.unsqueeze(-1) + place.minimum(width - 1)
        padding = place >= width
        members = None if len(positions) == len(sequences) else torch.tensor(positions, device=device)
        block = (lengths[0], consecutive, slice(counts[0] * chunk_size, lengths[0])) if dense else None
        round_of_tails = (0, len(positions))
        groups.append(Group(tokens, padding if padding.any() else None, (round_of_tails,), members, block))
    return Slab(tuple(sequences), tuple(groups))


def _long_and_short(tails: list[int], chunk_size: int) -> list[list[int]]:
    """Positions of the tails that are longer than half a chunk, and of the others; a list that would be empty is left
    out."""
    long = [position for position, tail in enumerate(tails) if tail > chunk_size // 2]
    short = [position for position, tail in enumerate(tails) if 0 < tail <= chunk_size // 2]
    return [positions for positions in (long, short) if positions]


def _group_rounds(counts: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Consecutive rounds whose chunks together number at most ``most`` (one round at least)."""
    if counts[0] == 0:
        return
    first, size, active = 0, 0, len(counts)
    for r in range(counts[0]):
        while counts[active - 1] <= r:
            active -= 1
        if size and size + active > most:
            yield first, r
            first, size = r, 0
        size += active
    yield first, counts[0]

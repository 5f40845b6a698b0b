"""Which tokens of a packed row a rank holds, and what it needs from the others: one object for all layers.

The row of ``total`` tokens is cut into *ranges* of equal length (up to one token), numbered from left to right:

    contiguous   one range per rank        0 | 1 | 2 | 3                  rank r holds range r
    zigzag       two ranges per rank       0 | 1 | 2 | 3 | 3 | 2 | 1 | 0  rank r holds ranges r and 2 ranks - 1 - r

A rank's tokens are those of its ranges, one after the other. Inside them a *piece* is the part of one document in one
range: what the ops of this rank see as a sequence. Only the first piece of a range can continue a document from the
left, and only the last one can go on to the right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.context_parallel import active_plan
from mdn.parallel.collectives import (
    Group,
    all_gather,
    gather_with_gradient,
    group_rank,
    group_size,
    sum_with_gradient,
)
from mdn.parallel.exchange import Exchanged

RANGES_PER_RANK = {"contiguous": 1, "zigzag": 2}
LARGEST_NODE = 8


class Piece(NamedTuple):
    """The part of a document in one of this rank's ranges."""

    document: int
    start: int
    """in this rank's tokens, as is the end"""
    end: int
    continues: bool
    """the document began further to the left"""
    goes_on: bool
    """... and ends further to the right"""


class Continuing(NamedTuple):
    """A piece that continues a document from the left: the first one of its range."""

    piece: int
    """its number among this rank's pieces"""
    slot: int
    """which of this rank's ranges it begins"""
    transits: bool
    """it fills the range and goes on, so that what comes in passes through to the next range"""


class ContextParallelPlan:
    """How the documents of one packed row are spread over the ranks of a group; see the top of the file.

    ``documents`` are the boundaries of the whole row; ``boundaries`` those of this rank's pieces. ``continues[i]``:
    the first document of range i began before it; ``transits[i]``: it also ends after it, so that the state passes
    through the whole range.
    """

    def __init__(self, documents: SequenceBoundaries, group: Group, layout: str, ranks_per_node: int | None):
        if layout not in RANGES_PER_RANK:
            raise ValueError(f"layout must be one of {', '.join(RANGES_PER_RANK)}, got {layout!r}")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.documents, self.group, self.layout = documents, group, layout
        self.ranks, self.rank = group_size(group), group_rank(group)
        self.slots = RANGES_PER_RANK[layout]
        ranges = self.ranks * self.slots
        if documents.total < ranges:
            raise ValueError(
                f"cu_seqlens must cover at least one token for each of the {ranges} ranges of {self.ranks} ranks "
                f"({layout}), got {documents.total} tokens"
            )
        self.node = node_size(self.ranks, ranks_per_node)
        self.edges = [number * documents.total // ranges for number in range(ranges + 1)]
        starts = set(documents.offsets)
        self.continues = [edge not in starts for edge in self.edges]
        self.transits = [
            self.continues[i] and self.continues[i + 1] and not self._borders_inside(i) for i in range(ranges)
        ]
        self.own_ranges = [self.range_of(self.rank, slot) for slot in range(self.slots)]
        self.pieces = [piece for number in self.own_ranges for piece in self._pieces_of(number)]
        self.boundaries = SequenceBoundaries.from_lengths(
            [piece.end - piece.start for piece in self.pieces], documents.cu_seqlens.device
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | SequenceBoundaries,
        group: Group | dist.device_mesh.DeviceMesh = None,
        layout: str = "contiguous",
        ranks_per_node: int | None = None,
    ) -> ContextParallelPlan:
        """From the cumulative lengths ``[0, ..., total]`` of the whole row, the same on every rank of ``group``.

        ``group`` is a process group, a mesh of one dimension, or None for all processes. Above 8 ranks summaries are
        exchanged in two levels, among ``ranks_per_node`` neighbours (default: up to 8) and then between nodes.
        """
        documents = SequenceBoundaries.from_cu_seqlens(cu_seqlens)
        group = group.get_group() if isinstance(group, dist.device_mesh.DeviceMesh) else group
        return cls(documents, group, layout, ranks_per_node)

    # ---------------------------------------------------------------- ranges and pieces

    def range_of(self, rank: int, slot: int) -> int:
        """The number of the range that a rank holds in its first or second slot."""
        return rank if slot == 0 else len(self.edges) - 2 - rank

    def holder_of(self, number: int) -> tuple[int, int]:
        """The rank and the slot of a range: the inverse of ``range_of``."""
        return (number, 0) if number < self.ranks else (len(self.edges) - 2 - number, 1)

    def _borders_inside(self, number: int) -> bool:
        offsets, start, end = self.documents.offsets, self.edges[number], self.edges[number + 1]
        return bisect_right(offsets, start) < bisect_left(offsets, end)

    def _pieces_of(self, number: int) -> Iterator[Piece]:
        """The pieces of one range; documents without tokens have none."""
        offsets, (start, end) = self.documents.offsets, self.edges[number : number + 2]
        shift = self._first_token(number) - start
        position = start
        while position < end:
            document = bisect_right(offsets, position) - 1
            stop = min(offsets[document + 1], end)
            yield Piece(
                document, position + shift, stop + shift, position > offsets[document], stop < offsets[document + 1]
            )
            position = stop

    def _first_token(self, number: int) -> int:
        """Where one of this rank's ranges begins in its tokens."""
        before = self.own_ranges[: self.own_ranges.index(number)]
        return sum(self.edges[i + 1] - self.edges[i] for i in before)

    @cached_property
    def last_pieces(self) -> list[int]:
        """For each of this rank's ranges: the number of its last piece."""
        ends = [self._first_token(number) + self.edges[number + 1] - self.edges[number] for number in self.own_ranges]
        return [next(i for i, piece in enumerate(self.pieces) if piece.end == end) for end in ends]

    @cached_property
    def continuing(self) -> list[Continuing]:
        """The pieces that need a state from another range."""
        starts = {self._first_token(number): slot for slot, number in enumerate(self.own_ranges)}
        return [
            Continuing(i, slot := starts[piece.start], self.transits[self.own_ranges[slot]])
            for i, piece in enumerate(self.pieces)
            if piece.continues
        ]

    @property
    def total(self) -> int:
        return self.documents.total

    @property
    def local_tokens(self) -> int:
        return self.boundaries.total

    @property
    def is_connected(self) -> bool:
        """Whether any document lies in more than one range: otherwise nothing is exchanged."""
        return any(self.continues)

    def __repr__(self) -> str:
        return (
            f"ContextParallelPlan({self.documents.num_sequences} documents, {self.total} tokens, {self.layout}, rank "
            f"{self.rank} of {self.ranks}: {self.local_tokens} tokens in {len(self.pieces)} pieces)"
        )

    # ---------------------------------------------------------------- tokens

    @cached_property
    def tokens(self) -> Tensor:
        """int64 ``[local tokens]``: the place of each of this rank's tokens in the whole row."""
        return self._tokens_of(self.rank)

    def _tokens_of(self, rank: int) -> Tensor:
        device = self.documents.cu_seqlens.device
        ranges = (self.range_of(rank, slot) for slot in range(self.slots))
        return torch.cat([torch.arange(self.edges[i], self.edges[i + 1], device=device) for i in ranges])

    @cached_property
    def positions(self) -> Tensor:
        """int64 ``[1, local tokens]``: each token's position in its document."""
        return self.documents.positions.index_select(0, self.tokens).unsqueeze(0)

    def scatter(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that holds all of them along ``dim``."""
        if x.shape[dim] != self.total:
            raise ValueError(f"x must have {self.total} tokens in dimension {dim}, got shape {list(x.shape)}")
        return x.index_select(dim, self.tokens.to(x.device))

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens, in order, of a tensor that holds this rank's along ``dim``; the same on every rank.

        Its gradient is that of the sum of all ranks' losses: a loss that every rank computes in full counts once per
        rank.
        """
        if x.shape[dim] != self.local_tokens:
            raise ValueError(
                f"x must have this rank's {self.local_tokens} tokens in dimension {dim}, got shape {list(x.shape)}"
            )
        x = x.movedim(dim, 0)
        width = self._widest
        if x.shape[0] < width:
            x = torch.cat([x, x.new_zeros(width - x.shape[0], *x.shape[1:])])
        everything = gather_with_gradient(x, self.group).flatten(0, 1)
        return everything.index_select(0, self._places.to(x.device)).movedim(0, dim)

    @cached_property
    def _widest(self) -> int:
        """Tokens of the rank that holds most."""
        sizes = [end - start for start, end in zip(self.edges, self.edges[1:])]
        return max(sum(sizes[self.range_of(rank, slot)] for slot in range(self.slots)) for rank in range(self.ranks))

    @cached_property
    def _places(self) -> Tensor:
        """Where each token of the row lies in the gathered ``[ranks * widest]``."""
        places = torch.empty(self.total, dtype=torch.int64, device=self.documents.cu_seqlens.device)
        for rank in range(self.ranks):
            tokens = self._tokens_of(rank)
            places[tokens] = torch.arange(tokens.numel(), device=tokens.device) + rank * self._widest
        return places

    # ---------------------------------------------------------------- states of documents

    def initial_of_pieces(self, state: Tensor) -> Tensor:
        """From states of all documents ``[N, ...]`` to those that this rank's pieces start from: zeros where a piece
        continues its document, because that state comes from another range."""
        chosen = state.index_select(0, torch.tensor([piece.document for piece in self.pieces], device=state.device))
        begins = torch.tensor([not piece.continues for piece in self.pieces], device=state.device)
        return torch.where(begins.reshape(-1, *([1] * (state.dim() - 1))), chosen, 0)

    def final_of_documents(self, state: Tensor, initial: Tensor | None) -> Tensor:
        """From the states after this rank's pieces ``[pieces, ...]`` to those after all documents ``[N, ...]``, on
        every rank. A document without tokens keeps its initial state."""
        last = [i for i, piece in enumerate(self.pieces) if not piece.goes_on]
        documents = torch.tensor([self.pieces[i].document for i in last], dtype=torch.int64, device=state.device)
        final = state.new_zeros(self.documents.num_sequences, *state.shape[1:])
        final = final.index_copy(0, documents, state[last])
        final = sum_with_gradient(final, self.group)
        empty = [n for n, length in enumerate(self.documents.lengths) if length == 0]
        if initial is not None and empty:
            places = torch.tensor(empty, device=state.device)
            final = final.index_copy(0, places, initial.index_select(0, places).to(final.dtype))
        return final

    def exchange(self, E: Tensor, A: Tensor) -> Exchanged:
        """Sends the maps X' = A X + E of this rank's ranges and returns the states that arrive at them."""
        return Exchanged(E, A, self)

    # ---------------------------------------------------------------- the past of a convolution

    def history(self, x: Tensor, width: int, initial: Tensor | None = None) -> Tensor:
        """The ``width`` inputs before each of this rank's pieces, oldest first: ``[pieces, width, C]``.

        ``x``: this rank's inputs ``[1, tokens, C]``. ``initial``: what came before every document, ``[N, width, C]``.
        """
        zeros = x.new_zeros(1, x.shape[-1])
        tails = torch.stack([self._tail(x[0], slot, width) for slot in range(self.slots)])
        tails = gather_with_gradient(tails, self.group) if self.is_connected else tails.unsqueeze(0)
        sources = [tails.flatten(0, 2), zeros]
        if initial is not None:
            sources.append(initial.to(x.dtype).flatten(0, 1))
        places = torch.tensor(self._history_places(width, initial is not None), device=x.device)
        return torch.cat(sources).index_select(0, places).unflatten(0, (len(self.pieces), width))

    def _tail(self, x: Tensor, slot: int, width: int) -> Tensor:
        """The last ``width`` inputs of a range, zeros in front of a shorter one."""
        number = self.own_ranges[slot]
        start = self._first_token(number)
        end = start + self.edges[number + 1] - self.edges[number]
        tail = x[max(start, end - width) : end]
        return nn.functional.pad(tail, (0, 0, width - tail.shape[0], 0))

    def _history_places(self, width: int, has_initial: bool) -> list[int]:
        """Rows of: all ranks' tails, one row of zeros, and the initial inputs of every document."""
        zeros = (self.ranks if self.is_connected else 1) * self.slots * width
        places = []
        for piece in self.pieces:
            begin = self.documents.offsets[piece.document]
            first = int(self.tokens[piece.start])
            for position in range(first - width, first):
                if position >= begin:
                    places.append(self._place_in_tails(position, width))
                elif has_initial:
                    places.append(zeros + 1 + piece.document * width + position - begin + width)
                else:
                    places.append(zeros)
        return places

    def _place_in_tails(self, position: int, width: int) -> int:
        number = bisect_right(self.edges, position) - 1
        rank, slot = self.holder_of(number)
        return (rank * self.slots + slot + 1) * width - (self.edges[number + 1] - position)

    # ---------------------------------------------------------------- labels, loss and gradients

    def global_loss(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares of a loss. Its gradient on a rank is that of the rank's own share: summed over
        ranks (``sum_gradients``, or data parallelism) the gradients of parameters are those of the whole loss."""
        total = all_gather(share.detach(), self.group).sum(0)
        return share + (total - share.detach())

    def count(self, here: Tensor) -> Tensor:
        """A number summed over the ranks."""
        return all_gather(here.detach(), self.group).sum(0)

    def sum_gradients(self, model: nn.Module) -> None:
        """Adds up the gradients of all parameters over the ranks, for loops without DistributedDataParallel."""
        if self.ranks == 1:
            return
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.group)


def node_size(ranks: int, wanted: int | None) -> int:
    """Ranks that exchange their summaries directly: all of them up to 8, else the largest divisor up to 8."""
    if wanted is None:
        return max(size for size in range(1, min(ranks, LARGEST_NODE) + 1) if ranks % size == 0)
    if wanted < 1 or ranks % wanted:
        raise ValueError(f"ranks_per_node must divide the {ranks} ranks, got {wanted}")
    return wanted


@contextmanager
def context_parallel(plan: ContextParallelPlan) -> Iterator[ContextParallelPlan]:
    """Inside the block every op, layer and model of ``mdn`` works on this rank's tokens of ``plan``."""
    with active_plan(plan):
        yield plan

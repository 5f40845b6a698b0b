"""Where packed sequences begin and end: one small object shared by ops, convolutions and attention.

A pack lays N sequences end to end on the time axis of one row: ``[1, total, ...]``. Because every consumer reads the
same object, an op and a convolution can never disagree about a boundary. Sequences may have zero or one token.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mdn.ops.tracing import is_traced

# Kept here and not as attributes of the tensors, which could then be neither saved nor copied.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""``cu_seqlens`` of an object -> weak reference to the object. A custom op takes only the tensor."""
_last_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""a caller's tensor -> the object that was made from the values it had"""

_lasting = torch.inference_mode(False)
"""What is made in inference mode could not be used for training later: autograd saves indices."""


class SequenceBoundaries:
    """Boundaries of N sequences packed into one row of ``total`` tokens.

    Build it with one of the ``from_*`` constructors. ``offsets`` are host integers, ``cu_seqlens`` the same numbers
    as an int64 tensor ``[N + 1]`` on the device. When it came from an attention mask, ``unpad`` and ``pad`` move
    tensors between the padded ``[B, T, ...]`` and the packed ``[1, total, ...]`` layout.
    """

    def __init__(self, cu_seqlens: Tensor, offsets: tuple[int, ...]):
        """This object owns ``cu_seqlens``: nothing else may write to it."""
        self.cu_seqlens = cu_seqlens
        self.offsets = offsets
        self.lengths = tuple(end - start for start, end in itertools.pairwise(offsets))
        self.max_length = max(self.lengths, default=0)
        if not torch.compiler.is_compiling():
            _owners[cu_seqlens] = weakref.ref(self)  # weakly, so that the two are no cycle
        self._padded: tuple[tuple[int, int], Tensor] | None = None
        # Made at first use, which may be while compiling: a compiler cannot trace the lock of a cached_property in
        # Python 3.11.
        self._sequence_ids: Tensor | None = None
        self._positions: Tensor | None = None
        self._stretched: dict[int, SequenceBoundaries] = {}
        self._elsewhere: dict[torch.device, SequenceBoundaries] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: what can be computed again is left out."""
        return _made, (self.offsets, self.cu_seqlens.device, self._padded)

    # ---------------------------------------------------------------- constructors

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | SequenceBoundaries, total: int | None = None) -> SequenceBoundaries:
        """From cumulative lengths ``[0, l1, l1 + l2, ..., total]``; repeated values are empty sequences.

        The values of a tensor are read at every call (for a GPU tensor that waits for the GPU) and copied: a buffer may
        be reused for the next batch. For several ops on one pack, make the object once and pass it to all of them.
        """
        boundaries: SequenceBoundaries
        if isinstance(cu_seqlens, SequenceBoundaries):
            boundaries = cu_seqlens
        else:
            boundaries = _owner(cu_seqlens) or cls._from_new_tensor(cu_seqlens)
        if total is not None and boundaries.total != total:
            raise ValueError(
                f"cu_seqlens must cover all {total} tokens of the packed row, but it ends at {boundaries.total}"
            )
        return boundaries

    @classmethod
    @_lasting
    def _from_new_tensor(cls, cu_seqlens: Tensor) -> SequenceBoundaries:
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1, got {list(cu_seqlens.shape)}")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.is_meta:
            raise ValueError("cu_seqlens must hold numbers, got a tensor on the meta device")
        offsets = tuple(cu_seqlens.tolist())
        compiling = torch.compiler.is_compiling()
        known: SequenceBoundaries | None = None if compiling else _last_read.get(cu_seqlens)
        if known is not None and known.offsets == offsets:  # the values decide, not the tensor's identity
            return known
        if offsets[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
        for i, (start, end) in enumerate(itertools.pairwise(offsets)):
            if end < start:
                raise ValueError(f"cu_seqlens must be sorted, but entry {i + 1} is {end} after {start}")
        boundaries = cls(cu_seqlens.detach().to(torch.int64, copy=True), offsets)
        if not compiling and _has_numbers():
            _last_read[cu_seqlens] = boundaries
        return boundaries

    @classmethod
    def from_lengths(
        cls, lengths: list[int] | tuple[int, ...], device: torch.device | str = "cpu"
    ) -> SequenceBoundaries:
        if len(lengths) == 0:
            raise ValueError(f"lengths must have at least one entry, got {lengths!r}")
        for i, length in enumerate(lengths):
            if length < 0:
                raise ValueError(f"lengths must be >= 0, but entry {i} is {length}")
        return _made(_offsets(lengths), device)

    @classmethod
    @_lasting
    def from_attention_mask(cls, mask: Tensor) -> SequenceBoundaries:
        """From a ``[B, T]`` mask of zeros and ones; row b becomes sequence b, wherever its ones are."""
        if mask.dim() != 2:
            raise ValueError(f"attention_mask must have shape [B, T], got {list(mask.shape)}")
        mask = mask.bool()
        lengths = mask.sum(-1).tolist()
        padded = (mask.shape[0], mask.shape[1]), mask.reshape(-1).nonzero().squeeze(-1)
        return _made(_offsets(lengths), mask.device, padded)

    @classmethod
    @_lasting
    def from_position_ids(cls, position_ids: Tensor) -> SequenceBoundaries:
        """From positions ``[1, T]`` (or ``[T]``): where they restart, a new sequence begins."""
        flat = position_ids.reshape(-1)
        if position_ids.dim() > 1 and position_ids.shape[0] != 1:
            raise ValueError(f"position_ids of a pack must have shape [1, T], got {list(position_ids.shape)}")
        starts = restarts(flat).nonzero().squeeze(-1) + 1
        edges = starts.new_tensor([0]), starts, starts.new_tensor([flat.numel()])
        cu_seqlens = torch.cat(edges)
        return cls(cu_seqlens, tuple(cu_seqlens.tolist()))

    # ---------------------------------------------------------------- facts

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def total(self) -> int:
        return self.offsets[-1]

    @property
    def sequence_ids(self) -> Tensor:
        """int64 ``[total]``: the sequence that each token belongs to."""
        if self._sequence_ids is not None:
            return self._sequence_ids
        device = self.cu_seqlens.device
        with torch.inference_mode(False):
            lengths = torch.tensor(self.lengths, device=device)
            numbers = torch.arange(self.num_sequences, device=device)
            # With its size given, the result can be made without waiting for the device.
            sequence_ids = torch.repeat_interleave(numbers, lengths, output_size=self.total)
        if _has_numbers():
            self._sequence_ids = sequence_ids
        return sequence_ids

    @property
    def positions(self) -> Tensor:
        """int64 ``[total]``: each token's position inside its sequence, from 0."""
        if self._positions is not None:
            return self._positions
        with torch.inference_mode(False):
            starts = self.cu_seqlens[self.sequence_ids]
            positions = torch.arange(self.total, device=self.cu_seqlens.device) - starts
        if _has_numbers():
            self._positions = positions
        return positions

    # ---------------------------------------------------------------- layout

    def stretched(self, factor: int) -> SequenceBoundaries:
        """Boundaries of the same sequences with every token repeated ``factor`` times; made once for all layers."""
        if factor in self._stretched:
            return self._stretched[factor]
        offsets = tuple(factor * offset for offset in self.offsets)
        with torch.inference_mode(False):
            stretched = SequenceBoundaries(factor * self.cu_seqlens, offsets)
        if _has_numbers():
            self._stretched[factor] = stretched
        return stretched

    def to(self, device: torch.device | str) -> SequenceBoundaries:
        """The same on another device; made once. The offsets are known to the host: nothing waits for a device."""
        device = torch.device(device)
        if device == self.cu_seqlens.device:
            return self
        if device in self._elsewhere:
            return self._elsewhere[device]
        moved = _made(self.offsets, device, self._padded)
        if _has_numbers():
            self._elsewhere[device] = moved
        return moved

    def unpad(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` to ``[1, total, ...]``: keeps only the tokens whose mask is one."""
        (batch, time), places = self._padding()
        if x.shape[:2] != (batch, time):
            raise ValueError(f"x must begin with [{batch}, {time}] as the attention mask does, got {list(x.shape)}")
        return x.reshape(batch * time, *x.shape[2:]).index_select(0, places.to(x.device)).unsqueeze(0)

    def pad(self, x: Tensor) -> Tensor:
        """``[1, total, ...]`` back to ``[B, T, ...]``, with zeros where the mask is zero."""
        (batch, time), places = self._padding()
        padded = x.new_zeros(batch * time, *x.shape[2:]).index_copy(0, places.to(x.device), x[0])
        return padded.reshape(batch, time, *x.shape[2:])

    def _padding(self) -> tuple[tuple[int, int], Tensor]:
        """(B, T) of the mask, and the places ``[total]`` of its ones among the B * T."""
        if self._padded is None:
            raise ValueError("unpad and pad need boundaries that were made from an attention mask")
        return self._padded


def _offsets(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(map(int, lengths), initial=0))


@_lasting
def _made(
    offsets: tuple[int, ...], device: torch.device | str, padded: tuple[tuple[int, int], Tensor] | None = None
) -> SequenceBoundaries:
    boundaries = SequenceBoundaries(torch.tensor(offsets, dtype=torch.int64, device=device), offsets)
    boundaries._padded = None if padded is None else (padded[0], padded[1].to(device))
    return boundaries


def _has_numbers() -> bool:
    """Whether a tensor that is made now may be kept: not one of FakeTensorMode or of a tracer. (While dynamo compiles,
    "kept" means at every call of the compiled function.)"""
    return torch.compiler.is_dynamo_compiling() or not is_traced()


def _owner(cu_seqlens: Tensor) -> SequenceBoundaries | None:
    """The object that this very tensor belongs to, if it still exists."""
    reference = None if torch.compiler.is_compiling() else _owners.get(cu_seqlens)
    return None if reference is None else reference()


def restarts(position_ids: Tensor) -> Tensor:
    """bool ``[..., T - 1]``: whether each position but the first begins a sequence. A jump forward does not."""
    return position_ids[..., 1:] <= position_ids[..., :-1]


def num_sequences(boundaries: SequenceBoundaries | Tensor) -> int:
    return boundaries.shape[0] - 1 if isinstance(boundaries, Tensor) else boundaries.num_sequences

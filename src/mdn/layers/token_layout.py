"""How the tokens of one model call lie in its tensors: one object, made once, read by every layer.

Either dense (``boundaries is None``): activations are ``[B, T, D]`` and row b is sequence b.
Or packed: activations are ``[1, total, D]`` and sequence n is the slice ``offsets[n]:offsets[n + 1]``. A pack is made
by the caller (``cu_seqlens``, ``seq_idx``, ``position_ids`` that restart) or by removing the padding of a batch, in
which case sequence n is row n of that batch and may have no token at all.

``make_layout`` is the one place that decides, from the arguments of a call, on padding and packing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries, restarts
from mdn.ops.context_parallel import requested_plan

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan


class RotaryAngles(NamedTuple):
    """cos and sin of RoPE's angles, float32 ``[B or 1, T, 1, dim / 2]``."""

    cos: Tensor
    sin: Tensor


class ExtendedIndices(NamedTuple):
    """Places in a pack in which every sequence has ``width`` extra entries in front of it, int64."""

    tokens: Tensor
    """``[total]``: of the tokens"""
    front: Tensor
    """``[N * width]``: of the extra entries"""
    last: Tensor
    """``[N * width]``: of each sequence's last ``width`` entries"""


class TokenLayout:
    """The layout of one call.

    ``shape`` is (B, T) as the caller gave them, ``past_length`` the columns that the cache already holds, and
    ``key_mask`` (bool ``[B, past + T]``, attention layers only) says which of all columns are tokens. With
    ``context_parallel`` the tokens are one rank's, and ``boundaries`` those of its pieces.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        boundaries: SequenceBoundaries | None = None,
        *,
        unpadded: bool = False,
        past_length: int = 0,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
        context_parallel: ContextParallelPlan | None = None,
    ):
        self.shape = shape
        self.context_parallel = context_parallel
        self.boundaries = boundaries
        self.unpadded = unpadded
        self.past_length = past_length
        self.key_mask = key_mask
        self.shared: dict[str, Tensor] = {}  # what a layer leaves for later ones of the same call
        self._positions = positions
        # The layers of one model may lie on several devices (device_map).
        self._rotary: dict[tuple[int, float, torch.device], RotaryAngles] = {}
        self._extended: dict[tuple[int, torch.device], ExtendedIndices] = {}

    @property
    def num_sequences(self) -> int:
        return self.shape[0] if self.boundaries is None else self.boundaries.num_sequences

    @property
    def packed_by_caller(self) -> bool:
        """The sequences share one row that the caller packed (not a batch whose padding was removed)."""
        return self.boundaries is not None and not self.unpadded

    def sequences(self) -> dict[str, Any]:
        """The arguments that tell an op where sequences begin: ``cu_seqlens`` and ``context_parallel``."""
        if self.context_parallel is not None:
            return {"context_parallel": self.context_parallel}
        return {"cu_seqlens": self.boundaries}

    # ---------------------------------------------------------------- padded <-> packed

    def enter(self, x: Tensor) -> Tensor:
        """From the caller's ``[B, T, ...]`` to what the layers see."""
        return self.boundaries.unpad(x) if self.unpadded and self.boundaries is not None else x

    def leave(self, x: Tensor) -> Tensor:
        """Back to the caller's ``[B, T, ...]`` (zeros where the mask is zero)."""
        return self.boundaries.pad(x) if self.unpadded and self.boundaries is not None else x

    # ---------------------------------------------------------------- positions

    def positions(self, device: torch.device) -> Tensor:
        """int64 ``[B or 1, T]``: each token's place in its own sequence, the cached part included."""
        if self._positions is None:
            self._positions = self._make_positions(device)
        return self._positions.to(device)

    def _make_positions(self, device: torch.device) -> Tensor:
        time = self.shape[1]
        if self.key_mask is not None:
            positions = (self.key_mask.cumsum(-1) - 1).clamp_min(0)[:, -time:]
            return self.enter(positions)
        if self.boundaries is not None:
            return self.boundaries.to(device).positions.unsqueeze(0)
        return torch.arange(self.past_length, self.past_length + time, device=device).unsqueeze(0)

    def rotary(self, dim: int, theta: float, device: torch.device) -> RotaryAngles:
        """RoPE's angles for heads of ``dim`` channels; computed once per call."""
        key = dim, theta, device
        if key not in self._rotary:
            frequency = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
            angle = self.positions(device).unsqueeze(-1).unsqueeze(-1) * frequency
            self._rotary[key] = RotaryAngles(angle.cos(), angle.sin())
        return self._rotary[key]

    # ---------------------------------------------------------------- room for the past in front of every sequence

    def extended_indices(self, width: int, device: torch.device) -> ExtendedIndices:
        """Where everything lies once every sequence has ``width`` extra entries in front, into which a short
        convolution puts its state."""
        key = width, device
        if key not in self._extended:
            assert self.boundaries is not None
            boundaries = self.boundaries.to(device)
            cu_seqlens, sequence_ids = boundaries.cu_seqlens, boundaries.sequence_ids
            tokens = torch.arange(boundaries.total, device=device) + (sequence_ids + 1) * width
            places = torch.arange(width, device=device)
            numbers = torch.arange(boundaries.num_sequences, device=device)
            front = ((cu_seqlens[:-1] + numbers * width).unsqueeze(-1) + places).reshape(-1)
            last = ((cu_seqlens[1:] + numbers * width).unsqueeze(-1) + places).reshape(-1)
            self._extended[key] = ExtendedIndices(tokens, front, last)
        return self._extended[key]


# ---------------------------------------------------------------------------------------- from the arguments of a call


def make_layout(
    shape: tuple[int, int],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    seq_idx: Tensor | None = None,
    past_length: int | None = None,
    has_attention: bool = False,
    all_tokens_valid: bool = False,
    context_parallel: ContextParallelPlan | None = None,
) -> TokenLayout:
    """The layout of ``shape`` = (B, T) new tokens.

    ``past_length``: columns that the cache holds, None without a cache. ``has_attention``: some layer needs positions
    and must know which cached columns are tokens. ``all_tokens_valid``: the caller knows that no new token is masked
    (decode steps of ``generate``), so the mask's values are not read.
    """
    if position_ids is not None and (
        position_ids.dim() != 2 or position_ids.shape[0] not in (1, shape[0]) or position_ids.shape[1] != shape[1]
    ):
        raise ValueError(f"position_ids must have shape [{shape[0]}, {shape[1]}], got {list(position_ids.shape)}")
    plan = requested_plan(context_parallel, cu_seqlens)
    if plan is not None:
        return _layout_of_plan(shape, plan, attention_mask, position_ids, seq_idx, past_length is not None)
    pack = _explicit_pack(shape, cu_seqlens, seq_idx, past_length is not None)
    if pack is not None:
        _refuse_padding(attention_mask, shape)
        return TokenLayout(shape, pack, positions=position_ids)
    past = past_length or 0
    key_mask = None
    if attention_mask is not None:
        mask = _checked_mask(attention_mask, shape, past, has_attention)
        new = mask[:, -shape[1] :]
        if not (all_tokens_valid or bool(new.all())):
            return _padded_layout(shape, new, mask if has_attention else None, position_ids, past)
        key_mask = mask if has_attention and past > 0 else None
    if position_ids is not None and shape[1] > 1:
        pack = _pack_of_positions(position_ids, shape[0], past_length is not None)
        if pack is not None:
            return TokenLayout(shape, pack, positions=position_ids)
    return TokenLayout(shape, past_length=past, key_mask=key_mask, positions=position_ids)


def _layout_of_plan(
    shape: tuple[int, int],
    plan: ContextParallelPlan,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    has_cache: bool,
) -> TokenLayout:
    """One rank's tokens; the plan knows the documents and the positions in them."""
    if shape != (1, plan.local_tokens):
        raise ValueError(
            f"with context_parallel the tokens must be this rank's, [1, {plan.local_tokens}] (plan.scatter), got "
            f"{list(shape)}"
        )
    if position_ids is not None or seq_idx is not None:
        name = "position_ids" if seq_idx is None else "seq_idx"
        raise ValueError(f"{name} must not be given beside context_parallel: the plan knows the documents")
    if has_cache:
        raise ValueError("past_key_values cannot be used with context_parallel: prefill and decode in one process")
    _refuse_padding(attention_mask, shape)
    return TokenLayout(shape, plan.boundaries, positions=plan.positions, context_parallel=plan)


def _padded_layout(
    shape: tuple[int, int], new: Tensor, key_mask: Tensor | None, position_ids: Tensor | None, past: int
) -> TokenLayout:
    """The tokens of a batch without its padding; ``new`` ``[B, T]`` is True at tokens."""
    boundaries = SequenceBoundaries.from_attention_mask(new)
    positions = None
    if position_ids is not None:
        positions = boundaries.unpad(position_ids.expand(shape))
        same_row = boundaries.sequence_ids.diff() == 0
        if not torch.compiler.is_compiling() and bool((same_row & restarts(positions[0])).any()):
            raise ValueError(
                "position_ids restart inside a row that attention_mask says is one padded sequence: "
                "mark a pack by cu_seqlens, without padding, or give one row per sequence"
            )
    return TokenLayout(shape, boundaries, unpadded=True, past_length=past, key_mask=key_mask, positions=positions)


def _explicit_pack(
    shape: tuple[int, int],
    cu_seqlens: Tensor | SequenceBoundaries | None,
    seq_idx: Tensor | None,
    has_cache: bool,
) -> SequenceBoundaries | None:
    """The sequences of a packed row from cumulative lengths, or from each token's sequence number (``seq_idx``)."""
    if cu_seqlens is None and seq_idx is None:
        return None
    name = "seq_idx" if cu_seqlens is None else "cu_seqlens"
    if shape[0] != 1:
        raise ValueError(f"{name} needs a batch of 1 (one packed row), got a batch of {shape[0]}")
    if has_cache:
        raise ValueError(f"{name} cannot be combined with past_key_values; pad the batch and give attention_mask")
    pack = None if cu_seqlens is None else SequenceBoundaries.from_cu_seqlens(cu_seqlens, total=shape[1])
    if seq_idx is None:
        return pack
    if list(seq_idx.shape) != list(shape):
        raise ValueError(f"seq_idx must have shape {list(shape)}, got {list(seq_idx.shape)}")
    lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    if pack is None:
        return SequenceBoundaries.from_lengths(lengths, seq_idx.device)
    if lengths != [length for length in pack.lengths if length > 0]:
        raise ValueError("cu_seqlens and seq_idx contradict each other: they mark different sequences")
    return pack


def _refuse_padding(attention_mask: Tensor | None, shape: tuple[int, int]) -> None:
    """Beside a pack a mask of ones is harmless (collators add one to every batch) and any other is a contradiction."""
    if attention_mask is None:
        return
    if list(attention_mask.shape) != list(shape) or not bool(attention_mask.bool().all()):
        raise ValueError(
            "a pack has no padding: beside cu_seqlens or seq_idx give no attention_mask, or ones with shape "
            f"{list(shape)}"
        )


def _checked_mask(attention_mask: Tensor, shape: tuple[int, int], past_length: int, has_attention: bool) -> Tensor:
    if attention_mask.dim() != 2 or attention_mask.shape[0] != shape[0]:
        raise ValueError(f"attention_mask must have shape [{shape[0]}, time], got {list(attention_mask.shape)}")
    columns = attention_mask.shape[1]
    if columns == past_length + shape[1] or (columns == shape[1] and not has_attention):
        return attention_mask.bool()
    raise ValueError(
        f"attention_mask must cover the {past_length} cached and {shape[1]} new columns, got {columns} columns"
    )


def _pack_of_positions(position_ids: Tensor, batch: int, has_cache: bool) -> SequenceBoundaries | None:
    """Boundaries if the positions of a single row restart, as the Trainer's padding-free collator writes them."""
    if batch == 1 and not has_cache:
        boundaries = SequenceBoundaries.from_position_ids(position_ids)
        return boundaries if boundaries.num_sequences > 1 else None
    if not torch.compiler.is_compiling() and bool(restarts(position_ids).any()):
        raise ValueError(
            "position_ids that restart mark a pack, which needs a batch of 1 and no past_key_values; "
            "otherwise give attention_mask"
        )
    return None

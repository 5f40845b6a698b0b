"""From the arguments of a model call to its :class:`TokenLayout`: the one place that decides on padding and packing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from mdn.layers import TokenLayout
from mdn.ops.boundaries import SequenceBoundaries


def make_layout(
    shape: tuple[int, int],
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | SequenceBoundaries | None,
    past_key_values: Any,
    has_attention: bool,
    all_tokens_valid: bool,
) -> TokenLayout:
    """The layout of ``shape`` = (B, T) new tokens.

    ``has_attention``: some layer needs to know which cached columns are tokens, and positions. ``all_tokens_valid``:
    the caller knows that no new token is masked (decode steps of ``generate``), so the mask is not read on the host.
    """
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != shape[1]):
        raise ValueError(f"position_ids must have shape [B, {shape[1]}], got {list(position_ids.shape)}")
    if cu_seqlens is not None:
        return _from_cu_seqlens(shape, cu_seqlens, attention_mask, past_key_values)
    if has_attention and isinstance(past_key_values, StaticCache):
        raise ValueError(
            "past_key_values: attention layers here need a DynamicCache(config=model.config), not a StaticCache"
        )
    past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
    if attention_mask is not None:
        mask = _checked_mask(attention_mask, shape, past_length, has_attention)
        return _from_mask(shape, mask, position_ids, past_length, has_attention, all_tokens_valid)
    if position_ids is not None and past_key_values is None and shape[1] > 1:
        boundaries = _restarts(position_ids)
        if boundaries is not None:
            return TokenLayout(shape, boundaries)
    return TokenLayout(shape, past_length=past_length, positions=position_ids)


def _from_cu_seqlens(shape, cu_seqlens, attention_mask, past_key_values) -> TokenLayout:
    if shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1 (one packed row), got a batch of {shape[0]}")
    if attention_mask is not None:
        raise ValueError("give either cu_seqlens or attention_mask, not both")
    if past_key_values is not None:
        raise ValueError("cu_seqlens cannot be combined with past_key_values; pad the batch and give attention_mask")
    return TokenLayout(shape, SequenceBoundaries.from_cu_seqlens(cu_seqlens, total=shape[1]))


def _checked_mask(attention_mask: Tensor, shape: tuple[int, int], past_length: int, has_attention: bool) -> Tensor:
    if attention_mask.dim() != 2 or attention_mask.shape[0] != shape[0]:
        raise ValueError(f"attention_mask must have shape [{shape[0]}, time], got {list(attention_mask.shape)}")
    columns = attention_mask.shape[1]
    if columns == past_length + shape[1] or (columns == shape[1] and not has_attention):
        return attention_mask.bool()
    raise ValueError(
        f"attention_mask must cover the {past_length} cached and {shape[1]} new columns, got {columns} columns"
    )


def _from_mask(
    shape: tuple[int, int],
    mask: Tensor,
    position_ids: Tensor | None,
    past_length: int,
    has_attention: bool,
    all_tokens_valid: bool,
) -> TokenLayout:
    key_mask = mask if has_attention else None
    new = mask[:, -shape[1] :]
    if all_tokens_valid or bool(new.all()):
        if past_length == 0:
            key_mask = None
        return TokenLayout(shape, past_length=past_length, key_mask=key_mask, positions=position_ids)
    boundaries = SequenceBoundaries.from_attention_mask(new)
    if position_ids is not None:
        position_ids = boundaries.unpad(position_ids.expand(shape))
    return TokenLayout(
        shape, boundaries, unpadded=True, past_length=past_length, key_mask=key_mask, positions=position_ids
    )


def _restarts(position_ids: Tensor) -> SequenceBoundaries | None:
    """Boundaries if the positions of a single row restart, as the Trainer's padding-free collator writes them."""
    if position_ids.shape[0] != 1:
        if not torch.compiler.is_compiling() and bool((position_ids.diff(dim=-1) != 1).any()):
            raise ValueError("position_ids that restart mark a pack, which needs a batch of 1; or give attention_mask")
        return None
    boundaries = SequenceBoundaries.from_position_ids(position_ids)
    return boundaries if boundaries.num_sequences > 1 else None

"""The cache layer of a recurrent mixer: transformers' linear-attention layer, plus the number of columns it has seen.

``generate`` reads the length of every cache, which transformers' own linear-attention layer does not know and which, in
a model without attention layers, no other layer could tell. The class registers itself with transformers under the
layer type of the recurrent mixers, so that ``DynamicCache(config=config)`` builds it. Memory per sequence is constant.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin, LinearAttentionLayer

from mdn.layers.mixer import RECURRENT_LAYER_TYPE


class RecurrentStateLayer(LinearAttentionLayer, CacheLayerMixin):
    """Conv states ``[N, C, W - 1]`` and recurrent states ``[N, HV, K, V]`` by number (MDN: 0 is S, 1 is M)."""

    _layer_type = RECURRENT_LAYER_TYPE
    is_sliding = False

    def __init__(self, **kwargs):
        super().__init__(number_of_states=0)
        self.keys = self.values = None
        self.is_initialized = False
        # transformers has one flag for both states of a number, but a mixer writes the conv state first
        self.has_recurrent_state: dict[int, bool] = {}
        self.columns = 0

    def _make_room(self, number: int) -> None:
        while self.number_of_states <= number:
            for states in (self.conv_states, self.recurrent_states, self.conv_kernel_size):
                states[self.number_of_states] = None
            for flags in (
                self.is_conv_states_initialized,
                self.is_recurrent_states_initialized,
                self.has_previous_state,
            ):
                flags[self.number_of_states] = False
            self.number_of_states += 1

    def lazy_initialization(self, *args, **kwargs) -> None:
        """In memory that may be written to in and outside of inference mode: the next turn may have another mode."""
        with torch.inference_mode(False):
            super().lazy_initialization(*args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs
    ) -> Tensor:
        """Replaces the state by the complete new one, unlike transformers' layer, which appends."""
        self._make_room(state_idx)
        held = self.conv_states[state_idx]
        if held is None or held.shape != conv_states.shape:  # also after a reset, with another batch
            self.lazy_initialization(conv_states=conv_states, state_idx=state_idx)
            held = self.conv_states[state_idx]
        assert held is not None
        self.has_previous_state[state_idx] = True
        return held.copy_(conv_states)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        self._make_room(state_idx)
        if self.device is None:  # a mixer without convolutions
            self.device = recurrent_states.device  # type: ignore[assignment]
        held = self.recurrent_states[state_idx]
        if held is not None and held.shape != recurrent_states.shape:
            self.is_recurrent_states_initialized[state_idx] = False
        state = super().update_recurrent_state(recurrent_states, state_idx)
        self.has_previous_state[state_idx] = self.has_recurrent_state[state_idx] = True
        return state

    # ---------------------------------------------------------------- length

    def advance(self, columns: int) -> None:
        """Counts the columns of one call, masked ones included, as the attention layers' caches do."""
        self.columns += columns

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reset(self) -> None:
        super().reset()
        self.has_recurrent_state.clear()
        self.columns = 0

    # ---------------------------------------------------------------- batch

    def _select(self, choose) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                with torch.inference_mode(False):  # see lazy_initialization
                    states[number] = None if state is None else choose(state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda state: state[indices])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False):  # see lazy_initialization
            vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    # ---------------------------------------------------------------- what a recurrent state cannot do

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return False

    def activate_past_recording(self) -> None:
        """Nothing to record: an older state cannot be rebuilt, see ``crop``."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError(
                f"cannot remove {abs(tokens_to_remove)} tokens from the cache: a recurrent state forgets the past. "
                "Copy the cache (copy.deepcopy) before the tokens that may be taken back. "
                "For the same reason assisted decoding is not supported. "
                "If attention layers come before this one, they have been shortened: discard the cache."
            )

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise ValueError("a recurrent mixer has no keys and values; use update_recurrent_state and update_conv_state")


STATIC_LAYER_TYPE_MAPPING[RECURRENT_LAYER_TYPE] = RecurrentStateLayer

"""Access to one layer's part of a transformers cache, without importing transformers.

The cache layer of a recurrent mixer holds dicts ``conv_states`` and ``recurrent_states`` from a number to a tensor
whose first dimension is the sequence. Mixers read them, and either replace them after a prefill or update them in
place. The cache layer of attention holds keys and values.

Nothing in a cache carries gradients: every call starts from its states as constants, in all mixers alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdn.layers.token_layout import TokenLayout


class LayerState:
    """The states of layer ``layer_idx`` for the sequences of one call (``layout``)."""

    slots: Tensor | None = None
    """int64 ``[B]``: where the rows of a decode step lie in the held tensors; None: row b is entry b"""
    mixed: MixedPack | None = None
    """the pack of a server's step, in which some sequences only decode"""

    def __init__(self, past_key_values: Any, layer_idx: int | None, layout: TokenLayout):
        if layer_idx is None:
            raise ValueError("a mixer needs layer_idx to use past_key_values, but it was built with layer_idx=None")
        self.cache = past_key_values
        self.layer_idx = layer_idx
        self.layout = layout

    @property
    def layer(self) -> Any:
        """The cache layer of a recurrent mixer."""
        layers = getattr(self.cache, "layers", ())
        if self.layer_idx >= len(layers) or not hasattr(layers[self.layer_idx], "has_recurrent_state"):
            raise ValueError(
                f"past_key_values has no recurrent state for layer {self.layer_idx}: "
                "make the cache with DynamicCache(config=model.config)"
            )
        return layers[self.layer_idx]

    def is_decode_step(self) -> bool:
        """One token per row after a held state, and no gradients are needed: the state can be updated in place."""
        one_token = self.layout.boundaries is None and self.layout.shape[1] == 1
        return one_token and not torch.is_grad_enabled() and self.recurrent(0) is not None

    def advance(self, columns: int) -> None:
        """Counts the columns of a call, if the cache layer does not count them itself (as attention's does)."""
        layer = self.cache.layers[self.layer_idx]
        if hasattr(layer, "advance"):
            layer.advance(columns)

    # ---------------------------------------------------------------- states of recurrent mixers

    def conv(self, number: int = 0) -> Tensor | None:
        """The convolution state ``[N, C, W - 1]``, or None before the first token."""
        layer = self.layer
        return self._checked(layer.conv_states.get(number)) if layer.has_previous_state.get(number) else None

    def recurrent(self, number: int = 0) -> Tensor | None:
        layer = self.layer
        return self._checked(layer.recurrent_states.get(number)) if layer.has_recurrent_state.get(number) else None

    def held_conv(self, number: int = 0) -> Tensor:
        """The held tensor itself, to be updated in place; it is an error if nothing came before."""
        return self._present(self.conv(number), "convolution", number)

    def held_recurrent(self, number: int = 0) -> Tensor:
        return self._present(self.recurrent(number), "recurrent", number)

    def initial_recurrent(self, number: int = 0) -> Tensor | None:
        """The held state as the constant that a rule starts from.

        A copy if autograd may save it, because ``write_recurrent`` will overwrite the held tensor.
        """
        held = self.recurrent(number)
        return held.clone() if held is not None and torch.is_grad_enabled() else held

    def write_conv(self, state: Tensor, number: int = 0) -> None:
        self.layer.update_conv_state(state.detach(), number)

    def write_recurrent(self, state: Tensor, number: int = 0) -> None:
        self.layer.update_recurrent_state(state.detach(), number)

    # ---------------------------------------------------------------- keys and values of attention

    def append_keys_and_values(self, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """All keys and values ``[B, HKV, columns, d]``, the new columns last; with a window at least those that the new
        tokens can see."""
        if self.layer_idx < len(self.cache.layers):
            self._checked(self.cache.layers[self.layer_idx].keys)
        keys, values = self.cache.update(keys, values, self.layer_idx)
        layer = self.cache.layers[self.layer_idx]
        layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        # A sliding cache layer keeps the columns [-(window - 1):], which for a window of 1 are all of them.
        if window == 1 and getattr(layer, "is_sliding", False):
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
        return keys, values

    # ---------------------------------------------------------------- checks

    def check_batch(self) -> None:
        """What this layer holds must be of as many sequences as this call has."""
        layer = self.cache.layers[self.layer_idx]
        if hasattr(layer, "has_recurrent_state"):
            self.recurrent(0)
        else:
            self._checked(getattr(layer, "keys", None))

    def _checked(self, state: Tensor | None) -> Tensor | None:
        """``state``, if its sequences can be those of this call."""
        if state is not None and state.dim() > 1 and state.shape[0] != self.layout.num_sequences:
            raise ValueError(
                f"past_key_values holds {state.shape[0]} sequences in layer {self.layer_idx}, but this call has "
                f"{self.layout.num_sequences}: a cache continues the batch that filled it "
                "(batch_select_indices and batch_repeat_interleave change its rows)"
            )
        return state

    def _present(self, state: Tensor | None, kind: str, number: int) -> Tensor:
        if state is None:
            raise ValueError(f"past_key_values has no {kind} state {number} for layer {self.layer_idx} yet")
        return state


class MixedPack(NamedTuple):
    """The two kinds of sequences in a pack: first ``steps`` with one token each after a held state, then the others.

    Convolutions and projections treat them alike. A rule steps the first in place and runs over the others, see
    ``mdn.layers.mixer.run_pack``.
    """

    steps: int
    stepped: LayerState
    others: LayerState
    others_layout: TokenLayout

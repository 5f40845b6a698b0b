"""Access to one layer's part of a transformers cache, without importing transformers.

The cache layer holds dicts ``conv_states`` and ``recurrent_states`` from a number to a tensor whose first dimension is
the sequence. Recurrent mixers read them, and either replace them after a prefill or update them in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LayerState:
    def __init__(self, past_key_values: Any, layer_idx: int | None):
        if layer_idx is None:
            raise ValueError("a mixer needs layer_idx to use past_key_values, but it was built with layer_idx=None")
        self.cache = past_key_values
        self.layer_idx = layer_idx

    @property
    def layer(self) -> Any:
        layers = getattr(self.cache, "layers", ())
        if self.layer_idx >= len(layers) or not hasattr(layers[self.layer_idx], "recurrent_states"):
            raise ValueError(
                f"past_key_values has no recurrent state for layer {self.layer_idx}: "
                "make the cache with DynamicCache(config=model.config)"
            )
        return layers[self.layer_idx]

    def conv(self, number: int = 0) -> Tensor | None:
        """The convolution state ``[N, C, W - 1]``, or None before the first token."""
        layer = self.layer
        return layer.conv_states.get(number) if layer.has_previous_state.get(number) else None

    def recurrent(self, number: int = 0) -> Tensor | None:
        layer = self.layer
        return layer.recurrent_states.get(number) if layer.has_previous_state.get(number) else None

    def held_conv(self, number: int = 0) -> Tensor:
        """The held tensor itself, to be updated in place; it is an error if nothing came before."""
        return self._held(self.conv(number), "convolution", number)

    def held_recurrent(self, number: int = 0) -> Tensor:
        return self._held(self.recurrent(number), "recurrent", number)

    def _held(self, found: Tensor | None, kind: str, number: int) -> Tensor:
        if found is None:
            raise ValueError(f"past_key_values has no {kind} state {number} for layer {self.layer_idx} yet")
        return found

    def write_conv(self, state: Tensor, number: int = 0) -> None:
        self.layer.update_conv_state(state.detach(), number)

    def write_recurrent(self, state: Tensor, number: int = 0) -> None:
        self.layer.update_recurrent_state(state.detach(), number)

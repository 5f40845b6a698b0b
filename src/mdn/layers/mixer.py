"""What every token mixer offers, so that one backbone can hold any of them.

A mixer maps hidden states ``[B, T, D]`` (or packed ``[1, total, D]``) to the same shape, reads where sequences begin
and end from a :class:`TokenLayout`, and keeps its state of every sequence in its layer of a transformers cache.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mdn.layers.initialisers import initialise
from mdn.layers.layout import TokenLayout
from mdn.layers.state import LayerState


class Mixer(nn.Module):
    """Base class. A subclass implements ``from_config``, ``mix``, ``state_shapes`` and ``flops_per_token``."""

    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    """names of its own parameters that weight decay should leave alone"""
    cache_type: ClassVar[str] = "recurrent_state"
    """the kind of cache layer it needs, an entry of the config's ``layer_types``"""

    layer_idx: int | None

    @classmethod
    def from_config(cls, config: Any, layer_idx: int) -> Self:
        """The mixer of layer ``layer_idx`` of a model with this configuration."""
        raise NotImplementedError

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        """The computation; ``state`` is None when nothing is to be remembered."""
        raise NotImplementedError

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Shape per sequence and dtype (None: the model's) of everything it keeps between calls."""
        raise NotImplementedError

    def flops_per_token(self, context: int) -> int:
        """Floating-point operations of one token's forward pass outside ``nn.Linear``, after ``context`` tokens."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        layout: TokenLayout | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        if layout is None:
            layout = TokenLayout((hidden_states.shape[0], hidden_states.shape[1]))
        state = None if past_key_values is None else LayerState(past_key_values, self.layer_idx)
        return self.mix(hidden_states, layout, state)

    def reset_parameters(self) -> None:
        """Fresh values from the table of initialisers for the parameters that stand directly in this module."""
        initialise(self)

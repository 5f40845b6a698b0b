"""What a recurrent layer remembers of a sequence, and how it is kept in vLLM's pages.

vLLM gives every layer a pool of pages; each page holds all states of one sequence (or of a cached prefix). A page is
cut into the tensors that the layer would keep in a transformers cache, and ``PagedState`` lets the layer read and write
them as if it were one. Nothing here knows which mixer it serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from mdn.layers import StateShape, make_layout
from mdn.layers.cache_access import LayerState
from mdn.layers.mixer import RECURRENT_LAYER_TYPE
from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.modeling import MomentumDeltaNetBlock


class LayerStates(NamedTuple):
    """The states of one layer by number, as in its layer of a transformers cache: without the sequence dimension."""

    conv: tuple[StateShape, ...]
    recurrent: tuple[StateShape, ...]

    @property
    def all(self) -> tuple[StateShape, ...]:
        """In the order in which they lie in a page."""
        return (*self.conv, *self.recurrent)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(state.shape for state in self.all)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(state.dtype for state in self.all if state.dtype is not None)


@torch.no_grad()
def recurrent_states(config: MomentumDeltaNetConfig, dtype: torch.dtype) -> LayerStates:
    """The states of every recurrent layer of this model; none if it has no such layer.

    The first one is called on tensors without values, and leaves its states in a transformers cache.
    """
    if RECURRENT_LAYER_TYPE not in config.layer_types:
        return LayerStates((), ())
    layer_idx = config.layer_types.index(RECURRENT_LAYER_TYPE)
    with torch.device("meta"):
        block = MomentumDeltaNetBlock(config, layer_idx).to(dtype)
        tokens = torch.empty(1, 2, config.hidden_size, dtype=dtype)
    cache = DynamicCache(config=config)
    block(tokens, make_layout((1, 2), past_length=0), past_key_values=cache)
    layer: Any = cache.layers[layer_idx]
    return LayerStates(_shapes(layer.conv_states), _shapes(layer.recurrent_states))


def _shapes(states: dict[int, Tensor | None]) -> tuple[StateShape, ...]:
    """By number; a number without a state (a layer has more states of the other kind) has none after it."""
    held = [states[number] for number in sorted(states)]
    return tuple(StateShape(tuple(state.shape[1:]), state.dtype) for state in held if state is not None)


class PagedState(LayerState):
    """The states of one layer for some requests of a step; request b owns page ``slots[b]`` (int64 ``[B]``).

    ``pages``: one tensor ``[pages, *shape]`` per state, in the order of ``LayerStates.all``, whose first
    ``convolutions`` belong to convolutions.
    """

    slots: Tensor

    def __init__(self, pages: tuple[Tensor, ...], convolutions: int, slots: Tensor):
        self.pages, self.convolutions, self.slots = pages, convolutions, slots

    def _conv_pages(self, number: int) -> Tensor:
        return self.pages[number]

    def _recurrent_pages(self, number: int) -> Tensor:
        return self.pages[self.convolutions + number]


class DecodeState(PagedState):
    """One token per request after a held state: everything is updated in place, on the pages themselves."""

    def is_decode_step(self) -> bool:
        return True

    def conv(self, number: int = 0) -> Tensor:
        return self._conv_pages(number)

    def recurrent(self, number: int = 0) -> Tensor:
        return self._recurrent_pages(number)

    held_conv, held_recurrent = conv, recurrent


class PrefillState(PagedState):
    """Any number of tokens per request; ``resumed`` (bool ``[B]``): something came before them."""

    def __init__(self, pages: tuple[Tensor, ...], convolutions: int, slots: Tensor, resumed: Tensor):
        super().__init__(pages, convolutions, slots)
        self.resumed = resumed

    def is_decode_step(self) -> bool:
        return False

    def conv(self, number: int = 0) -> Tensor:
        return self._initial(self._conv_pages(number))

    def recurrent(self, number: int = 0) -> Tensor:
        return self._initial(self._recurrent_pages(number))

    initial_recurrent = recurrent

    def write_conv(self, state: Tensor, number: int = 0) -> None:
        self._write(self._conv_pages(number), state)

    def write_recurrent(self, state: Tensor, number: int = 0) -> None:
        self._write(self._recurrent_pages(number), state)

    def _initial(self, pages: Tensor) -> Tensor:
        """A copy ``[B, *shape]`` of the requests' states; zeros for a new one, whose page holds what another left."""
        new = ~self.resumed.view(-1, *[1] * (pages.dim() - 1))
        return pages.index_select(0, self.slots).masked_fill_(new, 0)

    def _write(self, pages: Tensor, state: Tensor) -> None:
        pages.index_copy_(0, self.slots, state.to(pages.dtype))

"""RWKV-7's channel mixing, in the place of the MLP: it too sees the token before.

    y = W_v relu(W_k (x_t + x_k (x_{t-1} - x_t)))^2

The last token of every sequence is convolution state number 1 of the layer's cache (0 belongs to the time mixing).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.initialisers import initialise
from mdn.layers.layout import TokenLayout
from mdn.layers.rwkv7 import OrthogonalLinear, TokenShift
from mdn.layers.state import LayerState

STATE_NUMBER = 1


class ChannelMixing(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, layer_idx: int, num_hidden_layers: int):
        super().__init__()
        self.layer_idx, self.num_hidden_layers = layer_idx, num_hidden_layers
        self.token_shift = TokenShift(hidden_size)
        self.x_k = nn.Parameter(torch.empty(hidden_size))
        self.key = OrthogonalLinear(hidden_size, intermediate_size)
        self.value = OrthogonalLinear(intermediate_size, hidden_size, gain=0.0)
        initialise(self)

    def forward(self, x: Tensor, layout: TokenLayout, past_key_values: Any = None) -> Tensor:
        state = None if past_key_values is None else LayerState(past_key_values, self.layer_idx)
        mixed = x + self._shifted(x, layout, state) * self.x_k
        return self.value(F.relu(self.key(mixed)).square())

    def _shifted(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        if state is None:
            return self.token_shift(x, layout)[0]
        before = state.conv(STATE_NUMBER)
        if before is not None and layout.boundaries is None and x.shape[1] == 1:
            return self.token_shift.step(x[:, 0], before).unsqueeze(1)
        shifted, after = self.token_shift(x, layout, before, return_state=True)
        assert after is not None
        state.write_conv(after, STATE_NUMBER)
        return shifted

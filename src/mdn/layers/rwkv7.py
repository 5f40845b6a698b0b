"""RWKV-7: its time mixing (the mixer) and its channel mixing (which replaces the MLP).

Time mixing: every stream mixes a token with the previous one; low-rank maps make decay, rates and gate.

x_s      = x_t + mix_s (x_{t-1} - x_t)                  for the six streams s in r, w, k, v, a, g
w        = -exp(-1/2) sigmoid(lora_w(x_w))               log decay per key dimension
a        = sigmoid(lora_a(x_a))                          in-context learning rate
v        = v + (v_first - v) sigmoid(lora_v(x_v))        v_first: the values of the first layer
kappa    = normalise(k * k_k),  k = k (1 + (a - 1) k_a)
S_t      = diag(exp w) S_{t-1} + k v^T - (kappa a) (S_{t-1}^T kappa)^T,   o = S^T r
y        = W_o ((groupnorm(o) + (r . (k * r_k)) v) * lora_g(x_g))

Channel mixing also sees the previous token: y = W_v relu(W_k (x_t + x_k (x_{t-1} - x_t)))^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.cache_access import LayerState
from mdn.layers.conv import CausalWindow, KernelWeights
from mdn.layers.init import decay_bias, initialise, rate_bias, value_bias
from mdn.layers.linear import Linear
from mdn.layers.mixer import Mixer, StateShape, run_pack
from mdn.layers.token_layout import TokenLayout
from mdn.layers.token_mixing import mixed_output, mixed_streams, rule_inputs
from mdn.ops import first_order

STREAMS = "rwkvag"
FIRST_VALUES = "values of the first RWKV-7 layer"
TIME_MIXING_STATE, CHANNEL_MIXING_STATE = 0, 1  # numbers of the convolution states in one layer's cache


class TokenShift(CausalWindow):
    """x_{t-1} - x_t: a convolution of width 2 without parameters, so it packs, pads and decodes like the others."""

    def __init__(self, channels: int):
        super().__init__()
        self.channels, self.width = channels, 2

    def convolve(self, extended: Tensor) -> Tensor:
        return extended[:, :-1] - extended[:, 1:]

    def kernel_weights(self, x: Tensor) -> KernelWeights:
        return KernelWeights(x.new_tensor([1.0, -1.0]).expand(self.channels, 1, 2), None, silu=False)

    def advance(self, x: Tensor, state: Tensor) -> Tensor:
        shifted = (state[..., 0] - x.to(state.dtype)).to(x.dtype)
        state.copy_(x.unsqueeze(-1))
        return shifted


class OrthogonalLinear(Linear):
    """Starts as an orthogonal matrix times ``gain`` (0: zeros), and its bias at ``bias_curve()`` (None: zeros)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        gain: float = 1.0,
        bias_curve: Callable[[], Tensor] | None = None,
    ):
        super().__init__(in_features, out_features, bias)
        self.gain, self.bias_curve = gain, bias_curve


class LowRank(nn.Module):
    """W_2 activation(W_1 x) + bias."""

    def __init__(
        self, dim: int, rank: int, activation: nn.Module, bias: bool = True, curve: Callable[[], Tensor] | None = None
    ):
        super().__init__()
        gain = 0.1 * math.sqrt(max(1.0, rank / dim))
        last = OrthogonalLinear(rank, dim, bias, gain, curve)
        self.lora = nn.Sequential(OrthogonalLinear(dim, rank, gain=0.0), activation, last)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lora(x)
        return y


class HeadGroupNorm(nn.Module):
    """Group norm over the heads, then what a token reads of itself and the gate: ``mixed_output``. The norm's weight
    starts at ``initial_weight``."""

    def __init__(self, channels: int, eps: float, initial_weight: float):
        super().__init__()
        self.eps, self.initial_weight = eps, initial_weight
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor) -> Tensor:
        return mixed_output(o, r, k, v, gate, r_k=r_k, weight=self.weight, bias=self.bias, eps=self.eps)


class RuleInputs(NamedTuple):
    """The rule's arguments, ``[B, T, H, D]`` or ``[B, H, D]``."""

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


class RWKV7Attention(Mixer):
    """``num_hidden_layers`` and ``first_layer`` matter for the initial values of parameters and for ``v_first``."""

    shares_values: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int = 1024,
        head_dim: int = 64,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        norm_eps: float = 1e-5,
        num_hidden_layers: int = 24,
        first_layer: int = 0,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        super().__init__(hidden_size, layer_idx, backend)
        if hidden_size % head_dim:
            raise ValueError(f"hidden_size must be a multiple of head_dim={head_dim}, got {hidden_size}")
        self.num_hidden_layers = num_hidden_layers
        self.is_first = layer_idx is None or layer_idx == first_layer
        self.head_dim, self.num_heads = head_dim, hidden_size // head_dim
        self.token_shift = TokenShift(hidden_size)
        for stream in STREAMS:
            self.register_parameter(f"x_{stream}", nn.Parameter(torch.empty(1, 1, hidden_size)))
        self.k_k = nn.Parameter(torch.empty(hidden_size))
        self.k_a = nn.Parameter(torch.empty(hidden_size))
        self.r_k = nn.Parameter(torch.empty(self.num_heads, head_dim))
        self.r_proj = OrthogonalLinear(hidden_size, hidden_size)
        self.k_proj = OrthogonalLinear(hidden_size, hidden_size, gain=0.1)
        self.v_proj = OrthogonalLinear(hidden_size, hidden_size)
        self.o_proj = OrthogonalLinear(hidden_size, hidden_size, gain=0.0)
        self._build_low_rank(decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim)
        depth = (self.layer_idx or 0) + 1
        self.g_norm = HeadGroupNorm(hidden_size, head_dim * norm_eps, (depth / num_hidden_layers) ** 0.7)
        self.reset_parameters()

    def _build_low_rank(self, decay: int | None, rate: int | None, value: int | None, gate: int | None) -> None:
        """Ranks that are None follow the original: a multiple of 32 near ``factor * sqrt(hidden_size)``."""
        dim, root, wide = self.hidden_size, math.sqrt(self.hidden_size), self.head_dim / 64
        depth = (self.layer_idx or 0) / max(1, self.num_hidden_layers - 1)

        def rank(given: int | None, factor: float) -> int:
            return max(32, round(factor * root / 32) * 32) if given is None else given

        curve = partial(decay_bias, dim, self.head_dim, depth)
        self.w_lora = LowRank(dim, rank(decay, 2.5 * wide), nn.Tanh(), curve=curve)
        if not self.is_first:
            self.v_lora = LowRank(dim, rank(value, 1.7 * wide), nn.Identity(), curve=partial(value_bias, dim))
        curve = partial(rate_bias, dim, self.head_dim)
        self.a_lora = LowRank(dim, rank(rate, 2.5 * wide), nn.Identity(), curve=curve)
        self.g_lora = LowRank(dim, rank(gate, 5.0), nn.Sigmoid(), bias=False)

    @classmethod
    def arguments_from(cls, config: Any, layer_idx: int) -> dict[str, Any]:
        mixers = [config.mixer_name(i) for i in range(config.num_hidden_layers)]
        return {"first_layer": mixers.index("rwkv7"), **super().arguments_from(config, layer_idx)}

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        if state is not None and state.is_decode_step():
            held = state.held_conv(TIME_MIXING_STATE)
            shifted = self.token_shift.step(hidden_states[:, 0], held, state.slots).unsqueeze(1)
            inputs, gate = self._rule_inputs(hidden_states, shifted, layout)
            token = RuleInputs(*(x[:, 0] for x in inputs))
            o = self.step(*token, state).unsqueeze(1)
        else:
            before = None if state is None else state.conv(TIME_MIXING_STATE)
            shifted, after = self.token_shift(hidden_states, layout, before, return_state=state is not None)
            if state is not None:
                state.write_conv(after, TIME_MIXING_STATE)
            inputs, gate = self._rule_inputs(hidden_states, shifted, layout)
            o = run_pack(self.run, self.step, inputs, layout, state)
        y: Tensor = self.o_proj(self.g_norm(o, inputs.r, inputs.k, inputs.v, gate, self.r_k))
        return y

    def run(
        self,
        r: Tensor,
        w: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        layout: TokenLayout,
        state: LayerState | None,
    ) -> Tensor:
        """o ``[B, T, H, D]``."""
        return self.apply_rule(first_order.chunk_rwkv7, RuleInputs(r, w, k, v, a, b)._asdict(), layout, state)

    def step(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: LayerState) -> Tensor:
        """o ``[B, H, D]`` of one token per row; the held state is updated in place."""
        return self.apply_step(first_order.rwkv7_step, RuleInputs(r, w, k, v, a, b)._asdict(), state)

    def _rule_inputs(self, x: Tensor, shifted: Tensor, layout: TokenLayout) -> tuple[RuleInputs, Tensor]:
        """The rule's arguments ``[B, T, H, D]`` and the output gate ``[B, T, H * D]``."""
        xr, xw, xk, xv, xa, xg = mixed_streams(x, shifted, *(getattr(self, f"x_{stream}") for stream in STREAMS))
        w, k, a, b = rule_inputs(self.k_proj(xk), self.w_lora(xw), self.a_lora(xa), self.k_k, self.k_a, self.num_heads)
        r, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (self.r_proj(xr), self._values(xv, layout)))
        return RuleInputs(r, w, k, v, a, b), self.g_lora(xg)

    def _values(self, x: Tensor, layout: TokenLayout) -> Tensor:
        v: Tensor = self.v_proj(x)
        if self.is_first:
            layout.shared[FIRST_VALUES] = v
            return v
        if FIRST_VALUES not in layout.shared:
            raise ValueError(
                f"layer {self.layer_idx} needs the values of the first RWKV-7 layer, which has not run yet"
            )
        return torch.lerp(v, layout.shared[FIRST_VALUES].to(v), self.v_lora(x).sigmoid())

    def state_shapes(self) -> dict[str, StateShape]:
        return {
            "S": StateShape((self.num_heads, self.head_dim, self.head_dim), torch.float32),
            "conv": StateShape((self.hidden_size, 1), None),
        }

    def flops_per_token(self, context: int) -> int:
        """Per entry of the state: probing 2, decay 1, two writes 4, reading 2."""
        return 9 * self.hidden_size * self.head_dim


class ChannelMixing(nn.Module):
    """The last token of every sequence is convolution state number 1 of the layer's cache."""

    def __init__(self, hidden_size: int, intermediate_size: int, layer_idx: int, num_hidden_layers: int):
        super().__init__()
        self.layer_idx, self.num_hidden_layers = layer_idx, num_hidden_layers
        self.token_shift = TokenShift(hidden_size)
        self.x_k = nn.Parameter(torch.empty(hidden_size))
        self.key = OrthogonalLinear(hidden_size, intermediate_size)
        self.value = OrthogonalLinear(intermediate_size, hidden_size, gain=0.0)
        initialise(self)

    def forward(self, x: Tensor, layout: TokenLayout, past_key_values: Any = None) -> Tensor:
        state = None if past_key_values is None else LayerState(past_key_values, self.layer_idx, layout)
        return self.mix(x, layout, state)

    def mix(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        """The computation, as in ``Mixer``; ``state`` is None when nothing is to be remembered."""
        (mixed,) = mixed_streams(x, self._shifted(x, layout, state), self.x_k)
        y: Tensor = self.value(F.relu(self.key(mixed)).square())
        return y

    def _shifted(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        before = None if state is None else state.conv(CHANNEL_MIXING_STATE)
        if state is not None and before is not None and state.is_decode_step():
            return self.token_shift.step(x[:, 0], before, state.slots).unsqueeze(1)
        shifted: Tensor
        shifted, after = self.token_shift(x, layout, before, return_state=state is not None)
        if state is not None:
            state.write_conv(after, CHANNEL_MIXING_STATE)
        return shifted

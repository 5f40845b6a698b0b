"""The shell that most recurrent mixers share: projections and short convolutions before a rule, a gated norm after it.

    q, k, v = silu(conv(W x))                        [B, T, H, K], [B, T, H, K], [B, T, HV, V]
    o       = rule(q, k, v, x)                       [B, T, HV, V], the subclass
    y       = W_o (rmsnorm(o) * activation(W_g x))   [B, T, D]

A subclass implements ``run`` (any number of tokens, from a state to a state) and ``step`` (one token, state in place).
Convolution states are number 0, 1, 2 of the cache layer (q, k, v); the subclass numbers its recurrent states from 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.layout import TokenLayout
from mdn.layers.mixer import Mixer
from mdn.layers.norms import GatedRMSNorm, RMSNorm
from mdn.layers.short_conv import ShortConvolution
from mdn.layers.state import LayerState


class ProjectedMixer(Mixer):
    """Call ``build_projections`` and ``build_output`` in the constructor, in this order."""

    def build_projections(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_dim: int,
        expand_v: float,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
    ) -> None:
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, round(head_dim * expand_v)
        if not math.isclose(head_dim * expand_v, self.head_v_dim, rel_tol=1e-5) or self.head_v_dim < 1:
            raise ValueError(f"expand_v * head_dim must be a positive integer, got {expand_v} * {head_dim}")
        if self.num_v_heads < 1 or self.num_v_heads % num_heads != 0:
            raise ValueError(f"num_v_heads must be a multiple of num_heads={num_heads}, got {self.num_v_heads}")
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias)

    def build_output(
        self,
        use_gate: bool = True,
        norm_eps: float = 1e-6,
        gate_activation: str = "sigmoid",
        use_lora_gate: bool = False,
        lora_gate_rank: int | None = None,
    ) -> None:
        self.use_gate = use_gate
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)
        if not use_gate:
            self.o_norm: RMSNorm = RMSNorm(self.head_v_dim, norm_eps)
            return
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, gate_activation)
        self.g_proj: nn.Module = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        if use_lora_gate:
            rank = self.head_v_dim if lora_gate_rank is None else lora_gate_rank
            self.g_proj = nn.Sequential(
                nn.Linear(self.hidden_size, rank, bias=False), nn.Linear(rank, self.value_dim, bias=True)
            )

    # ---------------------------------------------------------------- the subclass's part

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        """o ``[B, T, HV, V]``; with a ``state``, starts from what it holds (if anything) and writes the new one."""
        raise NotImplementedError

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        """o ``[B, HV, V]`` for one token per row; the held state is updated in place."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the shared part

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        one_token = layout.boundaries is None and hidden_states.shape[1] == 1
        if state is not None and one_token and state.recurrent(0) is not None:
            token = hidden_states[:, 0]
            o = self.step(*self._step_inputs(token, state), token, state).unsqueeze(1)
        else:
            o = self.run(*self._inputs(hidden_states, layout, state), hidden_states, layout, state)
        if self.use_gate:
            o = self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (self.num_v_heads, -1)))
        else:
            o = self.o_norm(o)
        return self.o_proj(o.flatten(-2))

    def _inputs(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> tuple[Tensor, Tensor, Tensor]:
        streams = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if not self.use_short_conv:
            return self._split_heads(*map(F.silu, streams))
        for number, convolution in enumerate((self.q_conv1d, self.k_conv1d, self.v_conv1d)):
            before = None if state is None else state.conv(number)
            streams[number], after = convolution(streams[number], layout, before, return_state=state is not None)
            if state is not None and after is not None:
                state.write_conv(after, number)
        return self._split_heads(*streams)

    def _step_inputs(self, x: Tensor, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
        """The same for one token ``[B, D]``; the convolution states move on in place."""
        streams = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if not self.use_short_conv:
            return self._split_heads(*map(F.silu, streams))
        for number, convolution in enumerate((self.q_conv1d, self.k_conv1d, self.v_conv1d)):
            streams[number] = convolution.step(streams[number], state.held_conv(number))
        return self._split_heads(*streams)

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.num_heads, self.num_heads, self.num_v_heads)
        q, k, v = (x.unflatten(-1, (count, -1)) for x, count in zip((q, k, v), heads))
        return q, k, v

    # ---------------------------------------------------------------- facts

    def conv_state_shape(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        if not self.use_short_conv:
            return {}
        return {"conv": ((2 * self.key_dim + self.value_dim, self.conv_size - 1), None)}

    def conv_flops(self) -> int:
        return 2 * self.conv_size * (2 * self.key_dim + self.value_dim) if self.use_short_conv else 0

"""Mamba2: one projection for everything, one convolution, a scalar decay per head, and a gate before the norm.

    z, (x, B, C), dt = W_in u                       dt = softplus(dt + dt_bias), clamped to dt_limit
    x, B, C          = silu(conv(x, B, C))          x [H, P];  B, C [groups, N]
    S_t = exp(-exp(A_log) dt) S_{t-1} + B (dt x)^T  o = S^T C + D x
    y                = W_out rmsnorm(o * silu(z))

P is ``head_dim``, N ``state_size``. ``chunk_size`` changes the speed, not the result.
Blocks of Mamba2 models have no MLP (``use_mlp=False``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.cache_access import LayerState
from mdn.layers.conv import ShortConvolution
from mdn.layers.linear import Linear
from mdn.layers.mixer import Mixer, StateShape, run_pack
from mdn.layers.norms import RMSNorm
from mdn.layers.token_layout import TokenLayout
from mdn.ops import first_order


class ResidualLinear(Linear):
    """The last projection of a block; its initial values shrink with the depth of the model."""


class GroupedRMSNorm(RMSNorm):
    """RMS norm in groups of channels, each with its own mean square."""

    def __init__(self, dim: int, eps: float, groups: int):
        super().__init__(dim, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return super().forward(x)
        groups = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(x.dtype)


class Mamba2(Mixer):
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")

    def __init__(
        self,
        hidden_size: int = 2048,
        head_dim: int = 64,
        state_size: int = 128,
        expand: float = 2,
        n_groups: int = 1,
        norm_groups: int | None = None,
        conv_kernel: int = 4,
        use_conv_bias: bool = True,
        use_bias: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        super().__init__(hidden_size, layer_idx, backend)
        self.chunk_size = chunk_size
        self.inner_size = int(expand * hidden_size)
        if self.inner_size % head_dim:
            raise ValueError(f"expand * hidden_size must be a multiple of head_dim={head_dim}, got {self.inner_size}")
        self.num_heads, self.head_dim, self.state_size = self.inner_size // head_dim, head_dim, state_size
        if self.num_heads % n_groups:
            raise ValueError(f"n_groups must divide the number of heads, {self.num_heads}, got {n_groups}")
        self.n_groups = n_groups
        self.dt_limit = float(dt_limit[0]), float(dt_limit[1])
        channels = self.inner_size + 2 * n_groups * state_size
        self.conv1d = ShortConvolution(channels, conv_kernel, use_conv_bias)
        self.in_proj = Linear(hidden_size, self.inner_size + channels + self.num_heads, bias=use_bias)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = GroupedRMSNorm(self.inner_size, norm_eps, n_groups if norm_groups is None else norm_groups)
        self.out_proj = ResidualLinear(self.inner_size, hidden_size, bias=use_bias)
        self.reset_parameters()

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        sizes = [self.inner_size, self.conv1d.channels, self.num_heads]
        z, streams, dt = self.in_proj(hidden_states).split(sizes, -1)
        if state is not None and state.is_decode_step():
            streams = self.conv1d.step(streams[:, 0], state.held_conv(0), state.slots)
            o = self.step(streams, dt[:, 0], state).unsqueeze(1)
        else:
            before = None if state is None else state.conv(0)
            streams, after = self.conv1d(streams, layout, before, return_state=state is not None)
            if state is not None:
                state.write_conv(after, 0)
            o = run_pack(self.run, self.step, (streams, dt), layout, state)
        y: Tensor = self.out_proj(self._normed(o.flatten(-2).to(z.dtype), z))
        return y

    def run(self, streams: Tensor, dt: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        """o ``[B, T, H, P]``."""
        inputs, skip = self._rule_inputs(streams, dt)
        options: dict[str, Any] = {"scale": 1.0, "chunk_size": self.chunk_size}
        return self.apply_rule(first_order.chunk_simple_gla, inputs, layout, state, **options) + skip

    def step(self, streams: Tensor, dt: Tensor, state: LayerState) -> Tensor:
        """o ``[B, H, P]`` of one token per row; the held state is updated in place."""
        inputs, skip = self._rule_inputs(streams, dt)
        return self.apply_step(first_order.simple_gla_step, inputs, state, scale=1.0) + skip

    def _rule_inputs(self, streams: Tensor, dt: Tensor) -> tuple[dict[str, Any], Tensor]:
        """The rule's arguments, and what skips the rule, D x."""
        groups = self.n_groups * self.state_size
        x, B, C = streams.split([self.inner_size, groups, groups], -1)
        x = x.unflatten(-1, (self.num_heads, -1))
        B, C = B.unflatten(-1, (self.n_groups, -1)), C.unflatten(-1, (self.n_groups, -1))
        dtype = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.dt_limit)
        x = x.to(dtype)
        g = -self.A_log.to(dtype).exp() * dt
        return {"q": C, "k": B, "v": x * dt.unsqueeze(-1), "g": g}, self.D.to(dtype).unsqueeze(-1) * x

    def _normed(self, o: Tensor, z: Tensor) -> Tensor:
        """rmsnorm(o * silu(z)), in groups of channels."""
        dtype = torch.promote_types(o.dtype, torch.float32)
        normed: Tensor = self.norm(o.to(dtype) * F.silu(z.to(dtype)))
        return normed.to(o.dtype)

    def state_shapes(self) -> dict[str, StateShape]:
        return {
            "S": StateShape((self.num_heads, self.state_size, self.head_dim), torch.float32),
            "conv": StateShape((self.conv1d.channels, self.conv1d.width - 1), None),
        }

    def flops_per_token(self, context: int) -> int:
        """Per entry of the state: decay 1, writing 2, reading 2."""
        return 5 * self.inner_size * self.state_size + 2 * self.conv1d.width * self.conv1d.channels

"""Linear attention: no decay, no gate, only a feature map of queries and keys.

q, k = phi_q(W_q x), phi_k(W_k x)           phi(x) = (A x + a) * (B x + b) per head, or elu(x) + 1, relu, identity
o    = linear_attn(q, k, v)                  normalised by the sum of keys with do_feature_map_norm
y    = W_o rmsnorm(o)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.cache_access import LayerState
from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, StateShape
from mdn.layers.norms import RMSNorm
from mdn.layers.token_layout import TokenLayout
from mdn.ops import first_order


class ElementwiseProduct(nn.Module):
    """(A x + a) * (B x + b) on the last dimension."""

    def __init__(self, dim: int):
        super().__init__()
        self.layer1 = Linear(dim, dim)
        self.layer2 = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer1(x) * self.layer2(x)
        return y


class EluPlusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


FEATURE_MAPS: dict[str, Any] = {
    "elementwise_product": ElementwiseProduct,
    "elu": lambda dim: EluPlusOne(),
    "relu": lambda dim: nn.ReLU(),
    "identity": lambda dim: nn.Identity(),
}


class LinearAttention(ProjectedMixer):
    """With ``do_feature_map_norm`` the state holds the sum of the keys too, as recurrent state number 1."""

    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | {
        "norm": "mdn_shared",
        **{f"feature_map_{x}.{layer}": "mdn_shared" for x in "qk" for layer in ("layer1", "layer2")},
    }
    own_defaults: ClassVar[tuple[str, ...]] = ("expand_v",)
    silu_without_conv: ClassVar[bool] = False
    chunk_rule: ClassVar[Rule] = first_order.chunk_linear_attn
    step_rule: ClassVar[Rule] = first_order.linear_attn_step
    flops_per_entry: ClassVar[int] = 4  # writing 2, reading 2

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        feature_map: str = "elementwise_product",
        do_feature_map_norm: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {sorted(FEATURE_MAPS)}, got {feature_map!r}")
        heads = Heads.sharing(hidden_size, expand_k, expand_v, num_heads)
        super().__init__(hidden_size, heads, ConvSettings(used=False), backend, layer_idx)
        self.do_feature_map_norm = do_feature_map_norm
        self.feature_map_q = FEATURE_MAPS[feature_map](self.head_k_dim)
        self.feature_map_k = FEATURE_MAPS[feature_map](self.head_k_dim)
        self.norm = RMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = Linear(self.value_dim, hidden_size, bias=False)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        return {"q": self.feature_map_q(q), "k": self.feature_map_k(k), "v": v}

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        inputs = self.rule_inputs(q, k, v, hidden_states)
        if not self.do_feature_map_norm:
            return self.apply_rule(first_order.chunk_linear_attn, inputs, layout, state, normalize=False)
        S, z = (None, None) if state is None else (state.initial_recurrent(0), state.initial_recurrent(1))
        o: Tensor
        o, final_state = first_order.chunk_linear_attn(
            **inputs,
            initial_state=None if S is None or z is None else (S, z.unsqueeze(1)),
            output_final_state=state is not None,
            **layout.sequences(),
            backend=self.backend,
        )
        if state is not None and final_state is not None:
            S, z = final_state
            state.write_recurrent(S, 0)
            state.write_recurrent(z[:, 0], 1)
        return o

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        z = state.held_recurrent(1) if self.do_feature_map_norm else None
        inputs = self.rule_inputs(q, k, v, hidden_states)
        return self.apply_step(first_order.linear_attn_step, inputs, state, z_state=z)

    def output(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        """FLA's checkpoints call the norm ``norm``."""
        y: Tensor = self.o_proj(self.norm(o).flatten(-2))
        return y

    def state_shapes(self) -> dict[str, StateShape]:
        z = StateShape((self.num_heads, self.head_k_dim), torch.float32)
        return super().state_shapes() | ({"z": z} if self.do_feature_map_norm else {})

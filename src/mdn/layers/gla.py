"""Gated linear attention: a decay for every key dimension, no error correction, no convolutions by default.

g    = log sigmoid(W_gk2 W_gk1 x + b) / gate_logit_normalizer
o    = gla(q, k, v, g)
y    = W_o (rmsnorm(o) * swish(W_g x))
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, low_rank
from mdn.layers.norms import GatedRMSNorm
from mdn.ops import first_order


class GatedLinearAttention(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | {
        "gk_proj": "mdn_columns",
        "g_norm_swish_gate": "mdn_shared",
    }
    own_defaults: ClassVar[tuple[str, ...]] = ("expand_v", "use_short_conv", "conv_size", "conv_bias")
    silu_without_conv: ClassVar[bool] = False
    chunk_rule: ClassVar[Rule] = first_order.chunk_gla
    step_rule: ClassVar[Rule] = first_order.gla_step
    flops_per_entry: ClassVar[int] = 5  # decay 1, writing 2, reading 2

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.sharing(hidden_size, expand_k, expand_v, num_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min
        self.gk_proj = low_rank(hidden_size, gate_low_rank_dim, self.key_dim, bias=True)
        self.g_proj = Linear(hidden_size, self.value_dim, bias=False)
        self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, norm_eps, "swish")
        self.o_proj = Linear(self.value_dim, hidden_size, bias=False)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        raw = self.gk_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
        g = F.logsigmoid(raw.to(torch.promote_types(raw.dtype, torch.float32))) / self.gate_logit_normalizer
        return {"q": q, "k": k, "v": v, "g": g if self.clamp_min is None else g.clamp_min(self.clamp_min)}

    def output(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        """FLA's checkpoints call the norm ``g_norm_swish_gate``."""
        gate = self.g_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
        y: Tensor = self.o_proj(self.g_norm_swish_gate(o, gate).flatten(-2))
        return y

"""Kimi delta attention: Gated DeltaNet with a decay for every key dimension, through low-rank projections.

g    = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias)           [HV, K], or lower_bound sigmoid(exp(A_log) (...))
o    = kda(l2norm(q), l2norm(k), v, g, sigmoid(W_b x))
y    = W_o (rmsnorm(o) * sigmoid(W_g2 W_g1 x + b))
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, columns, low_rank
from mdn.ops import first_order
from mdn.ops.first_order.gates import log_decay_from, writing_strength


class KimiDeltaAttention(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | {"f_proj": "mdn_columns", **columns("b_proj")}
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")
    chunk_rule: ClassVar[Rule] = first_order.chunk_kda
    step_rule: ClassVar[Rule] = first_order.kda_step
    flops_per_entry: ClassVar[int] = 7  # probing 2, decay 1, writing 2, reading 2

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.of_width(head_dim, expand_v, num_heads, num_v_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, lower_bound
        gate_dim = self.num_v_heads * head_dim
        self.f_proj = low_rank(hidden_size, self.head_v_dim, gate_dim)
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim))
        self.add_output(norm_eps, "sigmoid", gate_rank=self.head_v_dim)
        self.reset_parameters()

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        raw = self.f_proj(hidden_states).unflatten(-1, (self.num_v_heads, -1))
        g = log_decay_from(raw, self.A_log, self.dt_bias, self.lower_bound, vector=True)
        beta = writing_strength(self.b_proj(hidden_states), True, self.allow_neg_eigval)
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}

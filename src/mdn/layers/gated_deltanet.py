"""Gated DeltaNet: one decay and one writing strength per head and token, from projections of the token.

g    = -exp(A_log) softplus(W_a x + dt_bias)       beta = sigmoid(W_b x), doubled with allow_neg_eigval
o    = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta)
y    = W_o (rmsnorm(o) * swish(W_g x))               or sigmoid, with output_gate_activation
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, columns
from mdn.ops import first_order
from mdn.ops.first_order.gates import log_decay_from, writing_strength


class GatedDeltaNet(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | columns("a_proj", "b_proj")
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")
    config_names: ClassVar[dict[str, str]] = {"output_gate_activation": "gate_activation"}
    chunk_rule: ClassVar[Rule] = first_order.chunk_gated_delta_rule
    step_rule: ClassVar[Rule] = first_order.gated_delta_rule_step
    flops_per_entry: ClassVar[int] = 7  # probing 2, decay 1, writing 2, reading 2

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.of_width(head_dim, expand_v, num_heads, num_v_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.add_output(norm_eps, output_gate_activation, use_gate)
        self.reset_parameters()

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        g = log_decay_from(self.a_proj(hidden_states), self.A_log, self.dt_bias)
        beta = writing_strength(self.b_proj(hidden_states), True, self.allow_neg_eigval)
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}

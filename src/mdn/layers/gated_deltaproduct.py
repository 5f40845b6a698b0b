"""Gated DeltaProduct (arXiv 2502.10297): Gated DeltaNet with n delta steps per token, each with its own key and value.

    g    = -exp(A_log) softplus(W_a x + dt_bias)       beta_j = sigmoid(W_b x), doubled with allow_neg_eigval
    S    = alpha S,  then for j = 1 ... n:  S = S + beta_j k_j (v_j - S^T k_j)^T
    o    = S^T q / sqrt(K)
    y    = W_o (rmsnorm(o) * swish(W_g x))

A step with beta up to 2 is a generalised Householder reflection, so that two of them can rotate. The rule is that of
Gated DeltaNet over a sequence n times as long (``mdn.ops.first_order.variants``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn.layers.cache_access import LayerState
from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, columns
from mdn.ops import first_order
from mdn.ops.first_order.gates import log_decay_from, writing_strength
from mdn.ops.first_order.variants import chunk_gated_delta_product


class GatedDeltaProduct(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | columns("a_proj", "b_proj")
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")
    chunk_rule: ClassVar[Rule] = chunk_gated_delta_product

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        num_householder: int = 2,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        if num_householder < 1:
            raise ValueError(f"num_householder must be at least 1, got {num_householder}")
        heads = Heads.of_width(head_dim, expand_v, num_heads, num_v_heads)
        conv = ConvSettings(use_short_conv, conv_size, conv_bias)
        super().__init__(hidden_size, heads, conv, backend, layer_idx, steps_per_token=num_householder)
        self.allow_neg_eigval = allow_neg_eigval
        self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(hidden_size, num_householder * self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.add_output(norm_eps)
        self.reset_parameters()

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        """q ``[..., H, K]``, k ``[..., n, H, K]``, v ``[..., n, HV, V]``, g ``[..., HV]``, beta ``[..., n, HV]``."""
        n = self.steps_per_token
        g = log_decay_from(self.a_proj(hidden_states), self.A_log, self.dt_bias)
        b = self.b_proj(hidden_states).unflatten(-1, (-1, n)).transpose(-1, -2)
        beta = writing_strength(b, True, self.allow_neg_eigval)
        k, v = (x.unflatten(-1, (n, -1)).transpose(-2, -3) for x in (k, v))
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        inputs = self.rule_inputs(q, k, v, hidden_states)
        for j in range(self.steps_per_token):
            one = inputs | {name: inputs[name][:, j] for name in ("k", "v", "beta")}
            o = self.apply_step(first_order.gated_delta_rule_step, one, state)
            inputs["g"] = torch.zeros_like(inputs["g"])  # the state decays once per token
        return o

    def flops_per_token(self, context: int) -> int:
        # each step: probing 2, writing 2; each token: decay 1, reading 2
        entries = self.num_v_heads * self.head_k_dim * self.head_v_dim
        return (4 * self.steps_per_token + 3) * entries + self.conv_flops()

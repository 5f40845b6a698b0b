"""Comba: Gated DeltaNet whose error is read along p = sigmoid(decay) k, with the query corrected by p (closed loop).

    q    = q - D p                                     one D and one decay per key head
    o    = comba(l2norm(q), l2norm(k), v, l2norm(p), g, beta)
    y    = W_o (rmsnorm(o) * sigmoid(W_g x))

As in FLA the rule normalises p too, so that ``decay`` acts on the correction of the query only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, columns
from mdn.ops import first_order
from mdn.ops.first_order.gates import log_decay_from, writing_strength


class Comba(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | columns("a_proj", "b_proj")
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")
    chunk_rule: ClassVar[Rule] = first_order.chunk_comba
    step_rule: ClassVar[Rule] = first_order.comba_step
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
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.of_width(head_dim, expand_v, num_heads, num_v_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        self.correction_factor = correction_factor
        self.a_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.decay = nn.Parameter(torch.empty(num_heads)) if use_inner_decay else None
        self.D = nn.Parameter(torch.empty(num_heads)) if use_output_correction else None
        self.add_output(norm_eps, "sigmoid", use_gate)
        self.reset_parameters()

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        p = k if self.decay is None else (k * self.decay.sigmoid().unsqueeze(-1)).to(k.dtype)
        if self.D is not None:
            q = (q - self.D.unsqueeze(-1) * p).to(q.dtype)
        g = log_decay_from(self.a_proj(hidden_states), self.A_log, self.dt_bias)
        beta = writing_strength(self.b_proj(hidden_states), True, False)
        return {"q": q, "k": k, "v": v, "p": p, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}

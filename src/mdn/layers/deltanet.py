"""DeltaNet: the delta rule without decay, with a writing strength per head and token.

o    = delta_rule(l2norm(q), l2norm(k), v, sigmoid(W_b x))
y    = W_o rmsnorm(o), or with use_gate W_o (rmsnorm(o) * swish(W_g x))
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, Rule, columns
from mdn.ops import first_order
from mdn.ops.first_order.gates import writing_strength


class DeltaNet(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | columns("b_proj")
    own_defaults: ClassVar[tuple[str, ...]] = ("expand_v", "use_gate", "use_short_conv", "conv_size", "conv_bias")
    chunk_rule: ClassVar[Rule] = first_order.chunk_delta_rule
    step_rule: ClassVar[Rule] = first_order.delta_rule_step
    flops_per_entry: ClassVar[int] = 6  # probing 2, writing 2, reading 2

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.sharing(hidden_size, expand_k, expand_v, num_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        self.b_proj = Linear(hidden_size, num_heads, bias=False) if use_beta else None
        self.add_output(norm_eps, "swish", use_gate)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        if self.b_proj is None:
            beta: Tensor | None = q.new_full(q.shape[:-1], 2.0 if self.allow_neg_eigval else 1.0)
        else:
            beta = writing_strength(self.b_proj(hidden_states), True, self.allow_neg_eigval)
        return {"q": q, "k": k, "v": v, "beta": beta, "use_qk_l2norm_in_kernel": True}

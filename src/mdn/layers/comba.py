"""Comba: Gated DeltaNet whose error is read along p = sigmoid(decay) k, with the query corrected by p (closed loop).

    q    = q - D p                                     one D and one decay per key head
    o    = comba(l2norm(q), l2norm(k), v, l2norm(p), g, beta)
    y    = W_o (rmsnorm(o) * sigmoid(W_g x))

As in FLA the rule normalises p too, so that `decay` acts on the correction of the query only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn.layers.first_order import Rule
from mdn.layers.gated_deltanet import GatedDeltaNet
from mdn.ops import first_order


class Comba(GatedDeltaNet):
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")
    config_fields: ClassVar[tuple[str, ...]] = (
        *(name for name in GatedDeltaNet.config_fields if name != "allow_neg_eigval"),
        "use_output_correction",
    )
    chunk_rule: ClassVar[Rule] = first_order.chunk_comba
    step_rule: ClassVar[Rule] = first_order.comba_step

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
        sizes = hidden_size, expand_v, head_dim, num_heads, num_v_heads
        super().__init__(
            *sizes,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            output_gate_activation="sigmoid",
            backend=backend,
            layer_idx=layer_idx,
        )
        self.correction_factor = correction_factor
        self.decay = nn.Parameter(torch.empty(num_heads)) if use_inner_decay else None
        self.D = nn.Parameter(torch.empty(num_heads)) if use_output_correction else None
        self.reset_parameters()

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        p = k if self.decay is None else (k * self.decay.sigmoid().unsqueeze(-1)).to(k.dtype)
        if self.D is not None:
            q = (q - self.D.unsqueeze(-1) * p).to(q.dtype)
        return super().rule_inputs(q, k, v, hidden_states) | {"p": p}

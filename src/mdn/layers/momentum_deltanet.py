"""The Momentum DeltaNet layer: projections, short convolutions, gates, the momentum delta rule, gated norm.

    q, k, v   = silu(conv(W x))                       [B, T, H, K], [B, T, H, K], [B, T, HV, V]
    q         = q - exp(D_log) k                      output correction, before the L2 norm inside the rule
    gates     = stability-aware maps of a, b, m, e    [B, T, HV]   (mdn.layers.gates)
    o         = momentum_delta_rule(q, k, v, gates)   [B, T, HV, V]
    y         = W_o (rmsnorm(o) * sigmoid(W_g x))     [B, T, D]

Parameter names are those of the authors' code and of FLA's layer, so that weights load without conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mdn import ops
from mdn.layers.gates import Gates, GateSettings, StabilityGates
from mdn.layers.layout import TokenLayout
from mdn.layers.projected_mixer import ProjectedMixer
from mdn.layers.state import LayerState

MODES = ("chunk", "fused_recurrent")


class MomentumDeltaNet(ProjectedMixer):
    """See the top of the file for the computation.

    Args:
        hidden_size: D.
        head_dim: K, and V = ``expand_v * head_dim``.
        num_heads, num_v_heads: H and HV (a multiple of H; None: H).
        mode: "chunk" or "fused_recurrent", the form of the rule for more than one token.
        use_gate, use_lora_gate, lora_gate_rank, gate_activation: the output gate; a low-rank projection if asked for.
        use_short_conv, conv_size, conv_bias: the convolutions; without them q, k, v still pass through SiLU.
        use_output_correction, use_momentum, min_log_mu, tau_factor, bound_alpha, bound_beta, eta_activation,
        use_p_times_alpha, allow_neg_eigval: the paper's and the released code's ablations; tau = sqrt(D / tau_factor).
        momentum_block_size: 1 is MDN; B > 1 takes the error at the first state of every block of B tokens.
        backend: which implementation of the rule (see ``mdn.ops``).
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "Mu_log", "mu_bias", "log_factor", "D_log")

    def __init__(
        self,
        hidden_size: int = 1024,
        head_dim: int = 128,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        expand_v: float = 2.0,
        mode: str = "chunk",
        use_gate: bool = True,
        use_lora_gate: bool = False,
        lora_gate_rank: int | None = None,
        gate_activation: str = "sigmoid",
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_correction: bool = True,
        use_momentum: bool = True,
        min_log_mu: float | None = -2.0,
        tau_factor: float = 1.0,
        bound_alpha: bool = True,
        bound_beta: bool = True,
        eta_activation: str = "tanh",
        use_p_times_alpha: bool = True,
        allow_neg_eigval: bool = False,
        momentum_block_size: int = 1,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"attn_mode must be one of {MODES}, got {mode!r}")
        if tau_factor < 1:
            raise ValueError(f"tau_factor must be at least 1, got {tau_factor}")
        if momentum_block_size < 1:
            raise ValueError(f"momentum_block_size must be at least 1, got {momentum_block_size}")
        self.layer_idx = layer_idx
        self.mode, self.backend, self.momentum_block_size = mode, backend, momentum_block_size
        self.use_output_correction, self.use_momentum = use_output_correction, use_momentum
        self.use_p_times_alpha = use_p_times_alpha
        settings = GateSettings(
            tau=math.sqrt(hidden_size / tau_factor),
            min_log_mu=min_log_mu,
            bound_alpha=bound_alpha,
            bound_beta=bound_beta,
            eta_activation=eta_activation,
            allow_neg_eigval=allow_neg_eigval,
        )
        self.gate_map = StabilityGates(settings)
        self.build_projections(
            hidden_size, num_heads, num_v_heads, head_dim, expand_v, use_short_conv, conv_size, conv_bias
        )
        self._build_gate_parameters(bound_alpha or bound_beta)
        self.build_output(use_gate, norm_eps, gate_activation, use_lora_gate, lora_gate_rank)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, layer_idx: int) -> Self:
        return cls(
            hidden_size=config.hidden_size,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            num_v_heads=config.num_v_heads,
            expand_v=config.expand_v,
            mode=config.attn_mode,
            use_gate=config.use_gate,
            use_lora_gate=config.use_lora_gate,
            lora_gate_rank=config.lora_gate_rank,
            gate_activation=config.gate_activation,
            use_short_conv=config.use_short_conv,
            conv_size=config.conv_size,
            conv_bias=config.conv_bias,
            use_output_correction=config.use_output_correction,
            use_momentum=config.use_momentum,
            min_log_mu=config.min_log_mu,
            tau_factor=config.tau_factor,
            bound_alpha=config.bound_alpha,
            bound_beta=config.bound_beta,
            eta_activation=config.eta_activation,
            use_p_times_alpha=config.use_p_times_alpha,
            allow_neg_eigval=config.allow_neg_eigval,
            momentum_block_size=config.momentum_block_size,
            norm_eps=config.norm_eps,
            backend=config.backend,
            layer_idx=layer_idx,
        )

    def _build_gate_parameters(self, bounded: bool) -> None:
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.e_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        # What an ablation does not use is not created: no parameter without a gradient.
        if self.use_momentum:
            self.m_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
            self.Mu_log = nn.Parameter(torch.empty(self.num_heads))
            self.mu_bias = nn.Parameter(torch.empty(self.num_v_heads))
        if bounded:
            self.log_factor = nn.Parameter(torch.empty(self.num_heads))
        if self.use_output_correction:
            self.D_log = nn.Parameter(torch.empty(self.num_heads))

    # ---------------------------------------------------------------- computing

    def gates(self, hidden_states: Tensor) -> Gates:
        """log_alpha, log_mu, beta, eta of every token and value head, ``[B, T, HV]``."""
        return self.gate_map(
            self.a_proj(hidden_states),
            self.b_proj(hidden_states),
            self.m_proj(hidden_states) if self.use_momentum else None,
            self.e_proj(hidden_states),
            self.A_log,
            self.dt_bias,
            getattr(self, "Mu_log", None),
            getattr(self, "mu_bias", None),
            getattr(self, "log_factor", None),
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        gates = self.gates(hidden_states)
        before = None
        if state is not None and state.recurrent(0) is not None:
            before = torch.stack([state.held_recurrent(0), state.held_recurrent(1)])
        arguments: dict[str, Any] = {
            "beta": gates.beta,
            "eta": gates.eta,
            "initial_state": before,
            "output_final_state": state is not None,
            "cu_seqlens": layout.boundaries,
            "use_p_times_alpha": self.use_p_times_alpha,
        }
        rule: Callable[..., tuple[Tensor, Tensor | None]]
        if self.momentum_block_size > 1:
            rule = ops.blockwise_momentum_delta_rule
            arguments["block_size"] = self.momentum_block_size
        else:
            rule = ops.chunk_momentum_delta_rule if self.mode == "chunk" else ops.fused_recurrent_momentum_delta_rule
            # The gate map cannot leave its range, so the values need not be read again.
            arguments |= {"backend": self.backend, "check_gates": False}
        o, after = rule(self._corrected(q, k), k, v, gates.log_alpha, gates.log_mu, **arguments)
        if state is not None and after is not None:
            state.write_recurrent(after[0], 0)
            state.write_recurrent(after[1], 1)
        return o

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        """Always token by token, also in a model that was trained with blocks."""
        gates = self.gates(hidden_states)
        return ops.momentum_delta_step(
            *(self._corrected(q, k), k, v, gates.log_alpha, gates.log_mu, None, gates.beta, gates.eta),
            (state.held_recurrent(0), state.held_recurrent(1)),
            use_p_times_alpha=self.use_p_times_alpha,
            backend=self.backend,
            check_gates=False,
        )

    def _corrected(self, q: Tensor, k: Tensor) -> Tensor:
        """q - d k, with d = exp(D_log) per key head."""
        return (q - self.D_log.exp().unsqueeze(-1) * k).to(q.dtype) if self.use_output_correction else q

    # ---------------------------------------------------------------- facts

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        state = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return {"S": (state, torch.float32), "M": (state, torch.float32), **self.conv_state_shape()}

    def flops_per_token(self, context: int) -> int:
        """Per entry of the state: probing 2, momentum's decay and write 3, the weight's decay and step 3, reading 2."""
        return 10 * self.num_v_heads * self.head_k_dim * self.head_v_dim + self.conv_flops()

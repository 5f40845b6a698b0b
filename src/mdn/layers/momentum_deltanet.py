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
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mdn import ops
from mdn.layers.gates import Gates, GateSettings, StabilityGates
from mdn.layers.layout import TokenLayout
from mdn.layers.mixer import Mixer
from mdn.layers.norms import GatedRMSNorm, RMSNorm
from mdn.layers.short_conv import ShortConvolution
from mdn.layers.state import LayerState

MODES = ("chunk", "fused_recurrent")


class MomentumDeltaNet(Mixer):
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
        self.layer_idx = layer_idx
        self.mode, self.backend, self.momentum_block_size = mode, backend, momentum_block_size
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, int(head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.use_gate, self.use_short_conv, self.conv_size = use_gate, use_short_conv, conv_size
        self.use_output_correction, self.use_momentum = use_output_correction, use_momentum
        self.use_p_times_alpha = use_p_times_alpha
        self._check(head_dim, expand_v, tau_factor)

        settings = GateSettings(
            tau=math.sqrt(hidden_size / tau_factor),
            min_log_mu=min_log_mu,
            use_momentum=use_momentum,
            bound_alpha=bound_alpha,
            bound_beta=bound_beta,
            eta_activation=eta_activation,
            allow_neg_eigval=allow_neg_eigval,
        )
        self.gate_map = StabilityGates(settings)
        self._build_projections(conv_bias)
        self._build_gate_parameters(bound_alpha or bound_beta)
        self._build_output(use_lora_gate, lora_gate_rank, gate_activation, norm_eps)
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

    # ---------------------------------------------------------------- building

    def _check(self, head_dim: int, expand_v: float, tau_factor: float) -> None:
        if self.mode not in MODES:
            raise ValueError(f"attn_mode must be one of {MODES}, got {self.mode!r}")
        if not math.isclose(head_dim * expand_v, self.head_v_dim, rel_tol=1e-5) or self.head_v_dim < 1:
            raise ValueError(f"expand_v * head_dim must be a positive integer, got {expand_v} * {head_dim}")
        if self.num_v_heads % self.num_heads != 0:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads={self.num_heads}, got num_v_heads={self.num_v_heads}"
            )
        if tau_factor < 1:
            raise ValueError(f"tau_factor must be at least 1, got {tau_factor}")
        if self.momentum_block_size < 1:
            raise ValueError(f"momentum_block_size must be at least 1, got {self.momentum_block_size}")

    def _build_projections(self, conv_bias: bool) -> None:
        self.q_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        if self.use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, self.conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, self.conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, self.conv_size, conv_bias)

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

    def _build_output(self, use_lora_gate: bool, rank: int | None, gate_activation: str, norm_eps: float) -> None:
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)
        if not self.use_gate:
            self.o_norm: RMSNorm = RMSNorm(self.head_v_dim, norm_eps)
            return
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, gate_activation)
        self.g_proj: nn.Module = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        if use_lora_gate:
            rank = self.head_v_dim if rank is None else rank
            self.g_proj = nn.Sequential(
                nn.Linear(self.hidden_size, rank, bias=False), nn.Linear(rank, self.value_dim, bias=True)
            )

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

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        decoding = (
            state is not None
            and layout.boundaries is None
            and hidden_states.shape[1] == 1
            and state.recurrent(0) is not None
        )
        if decoding:
            assert state is not None
            q, k, v = self._step_inputs(hidden_states[:, 0], state)
            o = self._step(q, k, v, self.gates(hidden_states[:, 0]), state).unsqueeze(1)
        else:
            q, k, v = self._inputs(hidden_states, layout, state)
            o = self._run(q, k, v, self.gates(hidden_states), layout, state)
        return self._output(o, hidden_states)

    def _inputs(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> tuple[Tensor, ...]:
        streams = [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]
        if not self.use_short_conv:
            return self._split_heads(*(nn.functional.silu(x) for x in streams))
        for number, convolution in enumerate((self.q_conv1d, self.k_conv1d, self.v_conv1d)):
            before = None if state is None else state.conv(number)
            streams[number], after = convolution(streams[number], layout, before, return_state=state is not None)
            if state is not None:
                state.write_conv(after, number)
        return self._split_heads(*streams)

    def _step_inputs(self, hidden_states: Tensor, state: LayerState) -> tuple[Tensor, ...]:
        """The same for one token ``[B, D]``; the convolution states move on in place."""
        streams = [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]
        if not self.use_short_conv:
            return self._split_heads(*(nn.functional.silu(x) for x in streams))
        for number, convolution in enumerate((self.q_conv1d, self.k_conv1d, self.v_conv1d)):
            streams[number] = convolution.step(streams[number], state.conv(number))
        return self._split_heads(*streams)

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q.unflatten(-1, (self.num_heads, -1)), k.unflatten(-1, (self.num_heads, -1))
        if self.use_output_correction:
            q = q - self.D_log.exp().unsqueeze(-1).to(q.dtype) * k
        return q, k, v.unflatten(-1, (self.num_v_heads, -1))

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        before = None if state is None else state.recurrent(0)
        if before is not None:
            before = torch.stack([before, state.recurrent(1)])
        arguments: dict[str, Any] = {
            "beta": gates.beta,
            "eta": gates.eta,
            "initial_state": before,
            "output_final_state": state is not None,
            "cu_seqlens": layout.boundaries,
            "use_qk_l2norm_in_kernel": True,
            "use_p_times_alpha": self.use_p_times_alpha,
        }
        if self.momentum_block_size > 1:
            rule = ops.blockwise_momentum_delta_rule
            arguments["block_size"] = self.momentum_block_size
        else:
            rule = ops.chunk_momentum_delta_rule if self.mode == "chunk" else ops.fused_recurrent_momentum_delta_rule
            # The gate map cannot leave its range, so the values need not be read again.
            arguments |= {"backend": self.backend, "check_gates": False}
        o, after = rule(q, k, v, gates.log_alpha, gates.log_mu, **arguments)
        if state is not None:
            state.write_recurrent(after[0], 0)
            state.write_recurrent(after[1], 1)
        return o

    def _step(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: LayerState) -> Tensor:
        """One token per sequence, ``[B, H, D]``; S and M are updated in place where the cache holds them."""
        return ops.momentum_delta_step(
            *(q, k, v, gates.log_alpha, gates.log_mu, None, gates.beta, gates.eta),
            (state.recurrent(0), state.recurrent(1)),
            use_p_times_alpha=self.use_p_times_alpha,
            backend=self.backend,
        )

    def _output(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        if self.use_gate:
            o = self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (self.num_v_heads, -1)))
        else:
            o = self.o_norm(o)
        return self.o_proj(o.flatten(-2))

    # ---------------------------------------------------------------- facts

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        state = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
            "S": (state, torch.float32),
            "M": (state, torch.float32),
        }
        if self.use_short_conv:
            shapes["conv"] = ((2 * self.key_dim + self.value_dim, self.conv_size - 1), None)
        return shapes

    def flops_per_token(self, context: int) -> int:
        """The recurrence itself: error, write, two decays with their sums, read-out; and the convolutions."""
        rule = 10 * self.num_v_heads * self.head_k_dim * self.head_v_dim
        convolutions = 2 * self.conv_size * (2 * self.key_dim + self.value_dim) if self.use_short_conv else 0
        return rule + convolutions

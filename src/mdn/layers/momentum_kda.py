"""Momentum with a decay for every key dimension: KDA's projections around the momentum delta rule with vector decays.

    q, k, v   = silu(conv(W x))                                            [B, T, H, K], [B, T, H, K], [B, T, HV, V]
    eta       = 1 + tanh(W_e x / tau)                                      [HV], in (0, 2)
    log alpha = log cos^2(theta) - exp(A_log) softplus(W_f2 W_f1 x + dt_bias)   [HV, K], theta = atan(eta s)
    log mu    = max(min_log_mu, -exp(Mu_log) softplus(W_m x + mu_bias))    [HV]
    step      = sin^2(theta) sigmoid(W_b x),  nu = sigmoid(W_n x + nu_bias)
    beta      = nu step,  direct = (1 - nu) step eta
    o         = vector_momentum_delta_rule(l2norm(q), l2norm(k), v, gates)
    y         = W_o (rmsnorm(o) * sigmoid(W_g2 W_g1 x + b))

The bound of alpha holds in every channel and mu is one number per head, so that the proof of docs/derivation.md keeps
the eigenvalues of every step in the unit disc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mdn import ops
from mdn.layers.cache_access import LayerState
from mdn.layers.init import checked_initial_range
from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, StateShape, columns, low_rank
from mdn.layers.token_layout import TokenLayout
from mdn.ops.first_order.gates import log_decay_from


class MomentumKDA(ProjectedMixer):
    tensor_plan: ClassVar[dict[str, str]] = (
        ProjectedMixer.head_plan | {"f_proj": "mdn_columns"} | columns("b_proj", "m_proj", "e_proj", "n_proj")
    )
    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "Mu_log", "mu_bias", "nu_bias", "log_factor")
    # probing 2, momentum's decay and write 3, the weight's decay and step 3, the direct write 2, reading 2
    flops_per_entry: ClassVar[int] = 12

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        min_log_mu: float | None = -2.0,
        tau_factor: float = 1.0,
        log_factor_init: float | Sequence[float] = 4.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.of_width(head_dim, expand_v, num_heads, num_v_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        if tau_factor < 1:
            raise ValueError(f"tau_factor must be at least 1, got {tau_factor}")
        self.tau, self.min_log_mu = math.sqrt(hidden_size / tau_factor), min_log_mu
        self.log_factor_init = checked_initial_range("log_factor_init", log_factor_init)
        gates, gate_dim = self.num_v_heads, self.num_v_heads * head_dim
        self.f_proj = low_rank(hidden_size, self.head_v_dim, gate_dim)
        self.b_proj = Linear(hidden_size, gates, bias=False)
        self.m_proj = Linear(hidden_size, gates, bias=False)
        self.e_proj = Linear(hidden_size, gates, bias=False)
        self.n_proj = Linear(hidden_size, gates, bias=False)
        self.A_log = nn.Parameter(torch.empty(gates))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim))
        self.Mu_log = nn.Parameter(torch.empty(gates))
        self.mu_bias = nn.Parameter(torch.empty(gates))
        self.nu_bias = nn.Parameter(torch.empty(gates))
        self.log_factor = nn.Parameter(torch.empty(gates))
        self.add_output(norm_eps, "sigmoid", gate_rank=self.head_v_dim)
        self.reset_parameters()

    def gates(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """log_alpha ``[..., HV, K]``, and log_mu, beta, eta and direct ``[..., HV]``, in float32 or float64."""
        raw = self.f_proj(hidden_states).unflatten(-1, (self.num_v_heads, -1))
        log_decay = log_decay_from(raw, self.A_log, self.dt_bias, vector=True)
        projections = (self.b_proj, self.m_proj, self.e_proj, self.n_proj)
        b, m, e, n = (projection(hidden_states).to(log_decay.dtype) for projection in projections)
        eta = 1 + torch.tanh(e / self.tau)
        squared_tangent = (eta * self.log_factor.to(eta.dtype).exp()).square()  # cos^2 = 1 / (1 + this)
        log_mu = log_decay_from(m, self.Mu_log, self.mu_bias)
        if self.min_log_mu is not None:
            log_mu = log_mu.clamp_min(self.min_log_mu)
        step = torch.sigmoid(b) * (squared_tangent / (1 + squared_tangent))
        beta = torch.sigmoid(n + self.nu_bias.to(n.dtype)) * step
        return {
            "log_alpha": log_decay - torch.log1p(squared_tangent).unsqueeze(-1),
            "log_mu": log_mu,
            "beta": beta,
            "eta": eta,
            "direct": (step - beta) * eta,
        }

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        # The gate map cannot leave its range, so the values need not be checked again.
        return {"q": q, "k": k, "v": v, **self.gates(hidden_states), "backend": self.backend, "check_gates": False}

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        """S and M are recurrent states 0 and 1."""
        S, M = (None, None) if state is None else (state.initial_recurrent(0), state.initial_recurrent(1))
        o, final_state = ops.chunk_vector_momentum_delta_rule(
            **self.rule_inputs(q, k, v, hidden_states),
            initial_state=None if S is None or M is None else (S, M),
            output_final_state=state is not None,
            **layout.sequences(),
        )
        if state is not None and final_state is not None:
            state.write_recurrent(final_state[0], 0)
            state.write_recurrent(final_state[1], 1)
        return o

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        inputs = self.rule_inputs(q, k, v, hidden_states)
        states = state.held_recurrent(0), state.held_recurrent(1)
        o: Tensor = ops.vector_momentum_delta_step(**inputs, state=states, state_indices=state.slots)
        return o

    def state_shapes(self) -> dict[str, StateShape]:
        return {"S": self.matrix_state(), "M": self.matrix_state(), **self.conv_state()}

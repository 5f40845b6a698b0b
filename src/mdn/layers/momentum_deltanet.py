"""The Momentum DeltaNet layer: projections, short convolutions, gates, the momentum delta rule, gated norm.

    q, k, v   = silu(conv(W x))                       [B, T, H, K], [B, T, H, K], [B, T, HV, V]
    q         = q - exp(D_log) k                      output correction, before the L2 norm inside the rule
    gates     = stability-aware maps of a, b, m, e    [B, T, HV]
    o         = momentum_delta_rule(q, k, v, gates)   [B, T, HV, V]
    y         = W_o (rmsnorm(o) * sigmoid(W_g x))     [B, T, D]

The gates (section 3.3 of the paper) come from four projections of the token (a, b, m, e, each ``[..., HV]``) and
per-head parameters:

    eta       = 1 + tanh(e / tau)                      in (0, 2)
    alpha_max = cos^2(theta), beta_max = sin^2(theta)  with theta = atan(eta * s), s = exp(log_factor)
    log alpha = log alpha_max - exp(A_log)  * softplus(a + dt_bias)
    log mu    = max(min_log_mu, - exp(Mu_log) * softplus(m + mu_bias))
    beta      = beta_max * sigmoid(b)

That is ``momentum="heavy_ball"``, the paper's. Two other kinds write a part of beta into the weight directly, with the
gate ``direct`` of the rule, S_t = alpha S - beta M + direct k r^T:

    quasi_hyperbolic   beta = nu beta,  direct = (1 - nu) beta eta     with nu = sigmoid(W_n x + nu_bias)
    nesterov           beta = mu beta,  direct = beta eta

Parameter names are those of the authors' code and of FLA's layer, so that weights load without conversion;
``n_proj`` and ``nu_bias`` are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn import ops
from mdn.layers.cache_access import LayerState
from mdn.layers.init import checked_initial_range
from mdn.layers.linear import Linear
from mdn.layers.mixer import ConvSettings, Heads, ProjectedMixer, StateShape, columns
from mdn.layers.token_layout import TokenLayout
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.cpu.layers import GateTensors, gates_fit
from mdn.ops.cpu.layers import momentum_gates as native_gates
from mdn.ops.fused import any_requires_gradient, is_native

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

MODES = ("chunk", "fused_recurrent")
KINDS_OF_MOMENTUM = ("heavy_ball", "quasi_hyperbolic", "nesterov")

# --------------------------------------------------------------------------------------------------------------- gates


class Gates(NamedTuple):
    """The gates of every token and value head, ``[..., HV]``; ``direct`` is None with heavy-ball momentum."""

    log_alpha: Tensor
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    direct: Tensor | None = None


@dataclass(frozen=True)
class GateSettings:
    """Which parts of the parameterisation are on; every ablation of the paper is one field."""

    tau: float
    """temperature of eta"""
    min_log_mu: float | None = -2.0
    """lower clamp of log mu; None: no clamp"""
    bound_alpha: bool = True
    """False: alpha_max = 1"""
    bound_beta: bool = True
    """False: beta_max = 1"""
    eta_activation: str = "tanh"
    """"tanh": 1 + tanh(x); "sigmoid": 2 sigmoid(x); "one": 1, without a projection"""
    allow_neg_eigval: bool = False
    """doubles beta (an extra of FLA's layer, outside the paper's stability argument)"""
    momentum: str = "heavy_ball"
    """one of ``KINDS_OF_MOMENTUM``"""

    @property
    def for_kernel(self) -> dict[str, float]:
        """The fields as ``MdnGates`` has them."""
        return {
            "tau": self.tau,
            "min_log_mu": -math.inf if self.min_log_mu is None else self.min_log_mu,
            "bound_alpha": self.bound_alpha,
            "bound_beta": self.bound_beta,
            "sigmoid_eta": self.eta_activation == "sigmoid",
            "double_beta": self.allow_neg_eigval,
        }

    def __post_init__(self) -> None:
        if self.momentum not in KINDS_OF_MOMENTUM:
            raise ValueError(f"momentum must be one of {', '.join(KINDS_OF_MOMENTUM)}, got {self.momentum!r}")
        if self.eta_activation not in ("tanh", "sigmoid", "one"):
            raise ValueError(f"eta_activation must be 'tanh', 'sigmoid' or 'one', got {self.eta_activation!r}")
        if self.min_log_mu is not None and not self.min_log_mu <= 0:
            raise ValueError(f"min_log_mu must be None or a number <= 0, got {self.min_log_mu}")
        if not self.tau > 0:
            raise ValueError(f"tau must be positive, got {self.tau}")


class StabilityGates(nn.Module):
    """Maps projections ``[..., HV]`` to :class:`Gates`, in float32, or float64 in float64 models.

    It owns no parameters (they keep their names in the layer). As a module it is the place for a forward hook that
    watches the gates of every call, decode steps included: ``layer.gate_map.register_forward_hook(...)``.
    """

    def __init__(self, settings: GateSettings):
        super().__init__()
        self.settings = settings
        self._for_kernel = settings.for_kernel

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        m: Tensor | None,
        e: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor,
        Mu_log: Tensor | None,
        mu_bias: Tensor | None,
        log_factor: Tensor | None,
        n: Tensor | None = None,
        nu_bias: Tensor | None = None,
    ) -> Gates:
        """Per-head parameters are ``[H]`` (A_log, Mu_log, log_factor) or ``[HV]`` (dt_bias, mu_bias, nu_bias).

        Without m (the ablation use_momentum=False) mu is exactly 0: log mu = -inf. Without e eta is 1. n and nu_bias
        are those of quasi-hyperbolic momentum.
        """
        gates = self._heavy_ball(GateTensors(a, b, m, e, A_log, dt_bias, Mu_log, mu_bias, log_factor))
        if self.settings.momentum == "heavy_ball":
            return gates
        log_alpha, log_mu, step, eta, _ = gates
        if n is None or nu_bias is None:  # Nesterov's
            return Gates(log_alpha, log_mu, log_mu.exp() * step, eta, step * eta)
        beta = torch.sigmoid(n.to(step.dtype) + nu_bias.to(step.dtype)) * step
        return Gates(log_alpha, log_mu, beta, eta, (step - beta) * eta)

    def _heavy_ball(self, tensors: GateTensors) -> Gates:
        a, b, m, e, A_log, dt_bias, Mu_log, mu_bias, log_factor = tensors
        settings = self.settings
        # One token only: recomputation in training must find the same bits with and without gradients.
        known = a.dim() == 2 and is_native(*tensors) and gates_fit(tensors)
        if known and not any_requires_gradient(tensors):
            return Gates(*native_gates(tensors, self._for_kernel))
        dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        a, b, dt_bias = a.to(dtype), b.to(dtype), dt_bias.to(dtype)
        if e is None:
            eta = torch.ones_like(a)
        elif settings.eta_activation == "tanh":
            eta = 1 + torch.tanh(e.to(dtype) / settings.tau)
        else:
            eta = 2 * torch.sigmoid(e.to(dtype) / settings.tau)
        log_alpha = -_per_value_head(A_log, a) * F.softplus(a + dt_bias)
        beta = torch.sigmoid(b)
        if log_factor is not None:
            # With x = eta s the bounds are 1 / (1 + x^2) and x^2 / (1 + x^2): no trigonometry, and
            # log alpha_max = -log1p(x^2) keeps its accuracy near 0.
            squared_tangent = (eta * _per_value_head(log_factor, a)).square()
            if settings.bound_alpha:
                log_alpha = log_alpha - torch.log1p(squared_tangent)
            if settings.bound_beta:
                beta = beta * (squared_tangent / (1 + squared_tangent))
        if settings.allow_neg_eigval:
            beta = 2 * beta
        if m is None or Mu_log is None or mu_bias is None:
            return Gates(log_alpha, torch.full_like(log_alpha, -math.inf), beta, eta)
        log_mu = -_per_value_head(Mu_log, a) * F.softplus(m.to(dtype) + mu_bias.to(dtype))
        if settings.min_log_mu is not None:
            log_mu = log_mu.clamp_min(settings.min_log_mu)
        return Gates(log_alpha, log_mu, beta, eta)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.settings).items())


def _per_value_head(log_parameter: Tensor, like: Tensor) -> Tensor:
    """exp of a per-key-head parameter, repeated for the value heads of its group."""
    return log_parameter.to(like.dtype).exp().repeat_interleave(like.shape[-1] // log_parameter.shape[0])


# ---------------------------------------------------------------------------------------------------------------- rule


class MomentumRule(nn.Module):
    """The momentum delta rule over any number of tokens, in the form that the layer was given.

    It owns no parameters. As a module it is the place for a forward hook that sees everything the rule sees:
    ``layer.rule.register_forward_hook(hook, with_kwargs=True)`` calls ``hook(module, (), inputs, output)``, where
    ``inputs`` has the keys of ``forward``'s arguments (q, k, v, gates, initial_state, ...) and ``output`` is
    ``MomentumOutput(o, final_state)``, with a final state if a cache is in use. Decode steps go through ``step``, which
    no hook sees.
    """

    def __init__(self, mode: str, block_size: int, use_p_times_alpha: bool, backend: str):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode (attn_mode in a config) must be one of {MODES}, got {mode!r}")
        if block_size < 1:
            raise ValueError(f"momentum_block_size must be at least 1, got {block_size}")
        self.mode, self.block_size, self.use_p_times_alpha, self.backend = mode, block_size, use_p_times_alpha, backend

    def forward(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        initial_state: tuple[Tensor, Tensor | None] | None,
        output_final_state: bool,
        boundaries: SequenceBoundaries | None,
        context_parallel: ContextParallelPlan | None = None,
    ) -> ops.MomentumOutput:
        """q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, gates ``[B, T, HV]``; initial S and M ``[N, HV, K, V]``."""
        arguments: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            **gates._asdict(),
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "cu_seqlens": None if context_parallel is not None else boundaries,
            "use_p_times_alpha": self.use_p_times_alpha,
        }
        if self.block_size > 1:
            if context_parallel is not None:
                raise ValueError(
                    f"momentum_block_size={self.block_size} cannot be combined with context_parallel: blocks would be "
                    "counted from the start of every rank's tokens"
                )
            return ops.blockwise_momentum_delta_rule(**arguments, block_size=self.block_size, backend=self.backend)
        rule = ops.chunk_momentum_delta_rule if self.mode == "chunk" else ops.fused_recurrent_momentum_delta_rule
        # The gate map cannot leave its range, so the values need not be checked again.
        return rule(**arguments, backend=self.backend, check_gates=False, context_parallel=context_parallel)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        state: tuple[Tensor, Tensor | None],
        state_indices: Tensor | None = None,
    ) -> Tensor:
        """o ``[B, HV, V]`` of one token; S and M (None: mu is 0) are updated in place. Token by token also in a model
        with blocks."""
        o: Tensor = ops.momentum_delta_step(
            q=q,
            k=k,
            v=v,
            **gates._asdict(),
            p=None,
            state=state,
            state_indices=state_indices,
            use_p_times_alpha=self.use_p_times_alpha,
            backend=self.backend,
            check_gates=False,
        )
        return o

    def extra_repr(self) -> str:
        return f"{self.mode}, block_size={self.block_size}, backend={self.backend}"


# --------------------------------------------------------------------------------------------------------------- layer


class MomentumDeltaNet(ProjectedMixer):
    """See the top of the file for the computation.

    Args:
        hidden_size: D.
        head_dim: K, and V = ``expand_v * head_dim``.
        num_heads, num_v_heads: H and HV (a multiple of H; None: H).
        mode: "chunk" or "fused_recurrent", the form of the rule for more than one token (``attn_mode`` in a config).
        use_gate, use_lora_gate, lora_gate_rank, gate_activation: the output gate, optionally by a low-rank projection.
        use_short_conv, conv_size, conv_bias: the convolutions; without them q, k, v still pass through SiLU.
        use_output_correction, use_momentum, min_log_mu, tau_factor, bound_alpha, bound_beta, eta_activation,
        use_p_times_alpha, allow_neg_eigval: the paper's and the released code's ablations; tau = sqrt(D / tau_factor).
        momentum: "heavy_ball" (the paper's), "quasi_hyperbolic" or "nesterov".
        mu_init: how fast the momentum decays in the beginning. A number c multiplies the released code's rates, a pair
            (low, high) draws -log mu of every head log-uniformly between them (at a projection of zero).
        log_factor_init: the initial s. A number c draws U(0, c), a pair (low, high) log-uniformly between them.
        momentum_block_size: 1 is MDN; B > 1 takes the error at the first state of every block of B tokens.
        backend: which implementation of the rule (see ``mdn.ops``).
    """

    tensor_plan: ClassVar[dict[str, str]] = ProjectedMixer.head_plan | columns("a_proj", "b_proj", "m_proj", "e_proj")
    no_weight_decay: ClassVar[tuple[str, ...]] = (
        "A_log",
        "dt_bias",
        "Mu_log",
        "mu_bias",
        "nu_bias",
        "log_factor",
        "D_log",
    )
    config_names: ClassVar[dict[str, str]] = {"mode": "attn_mode"}
    # probing 2, momentum's decay and write 3, the weight's decay and step 3, reading 2
    flops_per_entry: ClassVar[int] = 10

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
        momentum: str = "heavy_ball",
        mu_init: float | Sequence[float] = 1.0,
        log_factor_init: float | Sequence[float] = 4.0,
        momentum_block_size: int = 1,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        layer_idx: int | None = None,
    ):
        heads = Heads.of_width(head_dim, expand_v, num_heads, num_v_heads)
        super().__init__(hidden_size, heads, ConvSettings(use_short_conv, conv_size, conv_bias), backend, layer_idx)
        if tau_factor < 1:
            raise ValueError(f"tau_factor must be at least 1, got {tau_factor}")
        settings = GateSettings(
            tau=math.sqrt(hidden_size / tau_factor),
            min_log_mu=min_log_mu,
            bound_alpha=bound_alpha,
            bound_beta=bound_beta,
            eta_activation=eta_activation,
            allow_neg_eigval=allow_neg_eigval,
            momentum=momentum,
        )
        if momentum != "heavy_ball" and not use_momentum:
            raise ValueError(f"momentum must be 'heavy_ball' where use_momentum is false, got {momentum!r}")
        self.mu_init = checked_initial_range("mu_init", mu_init)
        self.log_factor_init = checked_initial_range("log_factor_init", log_factor_init)
        self.gate_map = StabilityGates(settings)
        self.rule = MomentumRule(mode, momentum_block_size, use_p_times_alpha, backend)
        self._add_gate_parameters(use_momentum, bound_alpha or bound_beta, use_output_correction)
        rank = self.head_v_dim if lora_gate_rank is None else lora_gate_rank
        self.add_output(norm_eps, gate_activation, use_gate, rank if use_lora_gate else None)
        self.reset_parameters()

    def _add_gate_parameters(self, use_momentum: bool, bounded: bool, use_output_correction: bool) -> None:
        """What an ablation does not use is not created: no parameter without a gradient."""
        self.a_proj = Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.b_proj = Linear(self.hidden_size, self.num_v_heads, bias=False)
        gated = self.gate_map.settings.eta_activation != "one"
        self.e_proj = Linear(self.hidden_size, self.num_v_heads, bias=False) if gated else None
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.m_proj = Linear(self.hidden_size, self.num_v_heads, bias=False) if use_momentum else None
        self.Mu_log = nn.Parameter(torch.empty(self.num_heads)) if use_momentum else None
        self.mu_bias = nn.Parameter(torch.empty(self.num_v_heads)) if use_momentum else None
        mixes = self.gate_map.settings.momentum == "quasi_hyperbolic"
        self.n_proj = Linear(self.hidden_size, self.num_v_heads, bias=False) if mixes else None
        self.nu_bias = nn.Parameter(torch.empty(self.num_v_heads)) if mixes else None
        self.log_factor = nn.Parameter(torch.empty(self.num_heads)) if bounded else None
        self.D_log = nn.Parameter(torch.empty(self.num_heads)) if use_output_correction else None

    @property
    def has_momentum(self) -> bool:
        """False: mu = 0."""
        return self.m_proj is not None

    @property
    def momentum_block_size(self) -> int:
        return self.rule.block_size

    @momentum_block_size.setter
    def momentum_block_size(self, size: int) -> None:
        self.rule.block_size = size

    # ---------------------------------------------------------------- computing

    def gates(self, hidden_states: Tensor) -> Gates:
        """The gates of every token and value head, ``[B, T, HV]``."""
        gates: Gates = self.gate_map(
            a=self.a_proj(hidden_states),
            b=self.b_proj(hidden_states),
            m=None if self.m_proj is None else self.m_proj(hidden_states),
            e=None if self.e_proj is None else self.e_proj(hidden_states),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            Mu_log=self.Mu_log,
            mu_bias=self.mu_bias,
            log_factor=self.log_factor,
            n=None if self.n_proj is None else self.n_proj(hidden_states),
            nu_bias=self.nu_bias,
        )
        return gates

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        """S and M are recurrent states 0 and 1. With mu = 0 every token forgets M, so it is not kept."""
        S = None if state is None else state.initial_recurrent(0)
        M = None if state is None or not self.has_momentum else state.initial_recurrent(1)
        output: ops.MomentumOutput = self.rule(
            q=self._corrected(q, k),
            k=k,
            v=v,
            gates=self.gates(hidden_states),
            initial_state=None if S is None else (S, M),
            output_final_state=state is not None,
            boundaries=layout.boundaries,
            context_parallel=layout.context_parallel,
        )
        if state is not None and output.final_state is not None:
            S, M = output.final_state
            state.write_recurrent(S, 0)
            if self.has_momentum:
                state.write_recurrent(M, 1)
        return output.o

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        S = state.held_recurrent(0)
        M = state.held_recurrent(1) if self.has_momentum else None
        return self.rule.step(self._corrected(q, k), k, v, self.gates(hidden_states), (S, M), state.slots)

    def _corrected(self, q: Tensor, k: Tensor) -> Tensor:
        """q - d k, with d = exp(D_log) per key head."""
        return q if self.D_log is None else (q - self.D_log.exp().unsqueeze(-1) * k).to(q.dtype)

    def state_shapes(self) -> dict[str, StateShape]:
        momentum = {"M": self.matrix_state()} if self.has_momentum else {}
        return {"S": self.matrix_state(), **momentum, **self.conv_state()}

    def flops_per_token(self, context: int) -> int:
        has_direct = self.gate_map.settings.momentum != "heavy_ball"
        direct_write = 2 * self.num_v_heads * self.head_k_dim * self.head_v_dim if has_direct else 0
        return super().flops_per_token(context) + direct_write

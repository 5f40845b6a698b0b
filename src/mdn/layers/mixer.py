"""What every token mixer offers, so that one backbone can hold any of them, and the shell that most of them share.

A mixer maps hidden states ``[B, T, D]`` (or packed ``[1, total, D]``) to the same shape, reads where sequences begin
and end from a :class:`TokenLayout`, and keeps its state of every sequence in its layer of a transformers cache.

:class:`ProjectedMixer` puts projections and short convolutions before a rule, and a norm after it:

    q, k, v = silu(conv(W x))                        [B, T, H, K], [B, T, H, K], [B, T, HV, V]
    o       = rule(q, k, v, x)                       [B, T, HV, V]
    y       = W_o (rmsnorm(o) * activation(W_g x))   [B, T, D]
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.cache_access import LayerState
from mdn.layers.conv import ShortConvolution
from mdn.layers.init import initialise
from mdn.layers.linear import Linear
from mdn.layers.norms import GatedRMSNorm, RMSNorm
from mdn.layers.token_layout import TokenLayout, make_layout
from mdn.ops.boundaries import SequenceBoundaries

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

Rule = Callable[..., Any]

# The layer type of recurrent mixers, for transformers' caches. "linear_attention" is part of it because other tools
# look for these words to recognise layers with a state (accelerate refuses to cut their sequences over devices).
RECURRENT_LAYER_TYPE = "recurrent_linear_attention"

# The field of the config whose None means the default of the mixer's constructor. (None of other fields is a value,
# for example no clamp or no window.)
FIELD_WITH_DEFAULT_OF_MIXER = "gate_activation"


class StateShape(NamedTuple):
    """One tensor that a mixer keeps between calls: its shape per sequence, and its dtype (None: the model's)."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Mixer(nn.Module):
    """Base class. A subclass implements ``mix``, ``state_shapes`` and ``flops_per_token``.

    Its constructor takes ``hidden_size``, any further arguments, and ``layer_idx``; ``from_config`` finds out by
    their names which of them the config sets.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    """names of its gates' own parameters. Gates exponentiate them, and so they neither decay nor lose precision: they
    stay float32 in a model of another dtype"""
    cache_type: ClassVar[str] = RECURRENT_LAYER_TYPE
    """the kind of cache layer it needs, an entry of the config's ``layer_types``"""
    shares_values: ClassVar[bool] = False
    """later layers read what this one leaves in ``layout.shared``, and gradients flow back through it"""
    config_names: ClassVar[dict[str, str]] = {}
    """arguments of the constructor that the config calls by another name"""
    reads_same_input: ClassVar[tuple[str, ...]] = ()
    """names of linear maps (or of low-rank ones, whose first half counts) that all read the token itself: with packed
    weights they are one matrix"""
    tensor_plan: ClassVar[dict[str, str]] = {}
    """transformers' tensor-parallel style of each of its modules by name ("" is the mixer itself); empty: its heads
    cannot be split over ranks"""
    own_defaults: ClassVar[tuple[str, ...]] = ()
    """arguments that keep their default although the config has a field of that name, which means something else for
    this mixer; ``mixer_options`` sets them"""

    def __init__(self, hidden_size: int, layer_idx: int | None = None, backend: str = "auto"):
        super().__init__()
        self.hidden_size, self.layer_idx, self.backend = hidden_size, layer_idx, backend

    # ---------------------------------------------------------------- the subclass's part

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        """The computation; ``state`` is None when nothing is to be remembered."""
        raise NotImplementedError

    def state_shapes(self) -> dict[str, StateShape]:
        """Everything it keeps between calls, by name."""
        raise NotImplementedError

    def flops_per_token(self, context: int) -> int:
        """Floating-point operations of one token's forward pass outside ``nn.Linear``, after ``context`` tokens."""
        raise NotImplementedError

    def keep_part(self, ranks: int) -> None:
        """Count only the heads of one of ``ranks`` ranks; the parameters are cut elsewhere (mdn.parallel.tensor)."""
        raise NotImplementedError

    # ---------------------------------------------------------------- from a config

    @classmethod
    def from_config(cls, config: Any, layer_idx: int) -> Self:
        """The mixer of layer ``layer_idx`` of a model with this configuration."""
        return cls(**cls.arguments_from(config, layer_idx))

    @classmethod
    def arguments_from(cls, config: Any, layer_idx: int) -> dict[str, Any]:
        """The constructor's arguments: fields of the config with these names, then ``config.mixer_options``."""
        known = {
            name: getattr(config, field)
            for name, field in cls.config_fields().items()
            if hasattr(config, field) and not (field == FIELD_WITH_DEFAULT_OF_MIXER and getattr(config, field) is None)
        }
        options = cls.checked_options(getattr(config, "mixer_options", None))
        return {**known, **options, "layer_idx": layer_idx}

    @classmethod
    def config_fields(cls) -> dict[str, str]:
        """The field of the config, if it has one of that name, that sets each argument of the constructor."""
        names = (name for name in cls.argument_names() if name not in cls.own_defaults)
        return {name: cls.config_names.get(name, name) for name in names}

    @classmethod
    def checked_options(cls, options: dict[str, Any] | None) -> dict[str, Any]:
        """``mixer_options``, if the constructor knows them all."""
        names = cls.argument_names()
        unknown = sorted(set(options or {}) - set(names))
        if unknown:
            raise ValueError(f"mixer_options has unknown keys {unknown}; {cls.__name__} knows {names}")
        return dict(options or {})

    @classmethod
    def argument_names(cls) -> list[str]:
        return [name for name in inspect.signature(cls).parameters if name != "layer_idx"]

    # ---------------------------------------------------------------- the call

    def forward(
        self,
        hidden_states: Tensor,
        layout: TokenLayout | None = None,
        past_key_values: Any = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | SequenceBoundaries | None = None,
        context_parallel: ContextParallelPlan | None = None,
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``.

        A model makes one ``layout`` for all its layers. A layer on its own takes ``attention_mask`` ``[B, past + T]``
        (the output is zero at masked tokens) or, for a pack ``[1, total, D]``, ``cu_seqlens`` ``[N + 1]``, or for one
        rank's tokens of a pack ``context_parallel``.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must have shape [B, T, {self.hidden_size}], got {list(hidden_states.shape)}"
            )
        if layout is None:
            return self._forward_alone(hidden_states, past_key_values, attention_mask, cu_seqlens, context_parallel)
        if not isinstance(layout, TokenLayout):
            raise TypeError(
                f"layout must be a TokenLayout, got {type(layout).__name__}; give a mask as attention_mask="
            )
        if attention_mask is not None or cu_seqlens is not None or context_parallel is not None:
            raise ValueError(
                "layout already says where the tokens are: give no attention_mask, cu_seqlens or context_parallel "
                "beside it"
            )
        return self.mix(hidden_states, layout, self._state(past_key_values, layout))

    def _forward_alone(
        self,
        hidden_states: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | SequenceBoundaries | None,
        context_parallel: ContextParallelPlan | None,
    ) -> Tensor:
        """A call outside a model, which would make the layout and count the cache's columns."""
        has_cache = past_key_values is not None and self.layer_idx is not None
        layout = make_layout(
            (hidden_states.shape[0], hidden_states.shape[1]),
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            past_length=past_key_values.get_seq_length(self.layer_idx) if has_cache else None,
            has_attention=self.cache_type == "full_attention",
            context_parallel=context_parallel,
        )
        state = self._state(past_key_values, layout)
        output = layout.leave(self.mix(layout.enter(hidden_states), layout, state))
        if state is not None:
            state.advance(hidden_states.shape[1])
        return output

    def _state(self, past_key_values: Any, layout: TokenLayout) -> LayerState | None:
        return None if past_key_values is None else LayerState(past_key_values, self.layer_idx, layout)

    def apply_rule(
        self, rule: Rule, inputs: dict[str, Any], layout: TokenLayout, state: LayerState | None, **options: Any
    ) -> Tensor:
        """o ``[B, T, HV, V]`` of a rule with one matrix state, from the held one (if any) to the new one."""
        # The gates come from maps that cannot leave their range, so their values are not checked again.
        o: Tensor
        o, final_state = rule(
            **inputs,
            initial_state=None if state is None else state.initial_recurrent(0),
            output_final_state=state is not None,
            **layout.sequences(),
            backend=self.backend,
            check_gates=False,
            **options,
        )
        if state is not None:
            state.write_recurrent(final_state, 0)
        return o

    def apply_step(self, rule: Rule, inputs: dict[str, Any], state: LayerState, **options: Any) -> Tensor:
        """o ``[B, HV, V]`` of one token per row; the held state is updated in place."""
        # As in ``apply_rule``, gates are not checked.
        options |= {"state_indices": state.slots, "backend": self.backend, "check_gates": False}
        o: Tensor = rule(**inputs, state=state.held_recurrent(0), **options)
        return o

    def reset_parameters(self) -> None:
        """Fresh values from the table of initialisers for the parameters that this module itself owns."""
        initialise(self)


def run_pack(
    run: Callable[..., Tensor],
    step: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    layout: TokenLayout,
    state: LayerState | None,
) -> Tensor:
    """``run(*tensors, layout, state)``, but ``step(*tensors, state)`` for the sequences of a pack that only decode.

    ``tensors`` and the result are ``[B, T, ...]`` for ``run``, and ``[B, ...]`` for ``step``.
    """
    if state is None or state.mixed is None:
        return run(*tensors, layout, state)
    steps, stepped, others, others_layout = state.mixed
    first = step(*(x[0, :steps] for x in tensors), stepped)
    rest = run(*(x[:, steps:] for x in tensors), others_layout, others)
    return torch.cat([first.unsqueeze(0), rest], dim=1)


class Heads(NamedTuple):
    """How many heads a mixer has, and how wide they are."""

    keys: int  # H
    values: int  # HV, a multiple of H
    key_dim: int  # K
    value_dim: int  # V

    @classmethod
    def of_width(cls, head_dim: int, expand_v: float, num_heads: int, num_v_heads: int | None = None) -> Heads:
        """Heads of K = ``head_dim`` and V = ``expand_v * head_dim``, whatever the model's width."""
        size = round(head_dim * expand_v)
        if not math.isclose(head_dim * expand_v, size, rel_tol=1e-5) or size < 1:
            raise ValueError(f"expand_v * head_dim must be a positive integer, got {expand_v} * {head_dim}")
        return cls(num_heads, num_heads if num_v_heads is None else num_v_heads, head_dim, size)

    @classmethod
    def sharing(cls, hidden_size: int, expand_k: float, expand_v: float, num_heads: int) -> Heads:
        """Heads that share ``expand_k * hidden_size`` channels of keys and ``expand_v * hidden_size`` of values."""
        dims = []
        for name, factor in (("expand_k", expand_k), ("expand_v", expand_v)):
            size = factor * hidden_size / num_heads
            if size != int(size) or size < 1:
                raise ValueError(f"{name} * hidden_size / num_heads must be a positive integer, got {size}")
            dims.append(int(size))
        return cls(num_heads, num_heads, *dims)


class ConvSettings(NamedTuple):
    """The short convolutions of q, k and v."""

    used: bool
    size: int = 4
    bias: bool = False


class Streams(NamedTuple):
    """Queries and keys ``[..., H, K]`` and values ``[..., HV, V]`` before the rule."""

    q: Tensor
    k: Tensor
    v: Tensor


class ProjectedMixer(Mixer):
    """Projections, short convolutions, a rule, a norm; see the top of the file.

    The constructor makes projections and convolutions. The subclass adds its gates and, if it does not replace
    ``output``, calls ``add_output``. It names a rule with one matrix state by ``chunk_rule``, ``step_rule`` and
    ``rule_inputs``, and computes any other rule in ``run`` and ``step``. Convolution states are number 0, 1, 2 of the
    cache layer (q, k, v), recurrent states are numbered from 0.
    """

    chunk_rule: ClassVar[Rule]
    """for any number of tokens: a function of ``mdn.ops.first_order``"""
    step_rule: ClassVar[Rule]
    """for one token, with the state updated in place"""
    flops_per_entry: ClassVar[int]
    """operations per entry of one state matrix and token"""
    reads_same_input: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "g_proj"),
        *("a_proj", "b_proj", "m_proj", "e_proj", "f_proj", "gk_proj"),  # gates, where a subclass has them
    )
    head_plan: ClassVar[dict[str, str]] = {
        "": "mdn_heads",
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise"),
        "g_proj": "mdn_columns",  # may be low-rank
        **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), "mdn_channels"),
        "o_norm": "mdn_shared",
        "o_proj": "rowwise",
    }
    """what a subclass with these modules puts into its ``tensor_plan``, beside its gates"""
    silu_without_conv: ClassVar[bool] = True
    """False: without convolutions q, k and v are plain projections"""

    o_proj: Linear
    o_norm: RMSNorm
    g_proj: nn.Module
    use_gate: bool

    def __init__(
        self,
        hidden_size: int,
        heads: Heads,
        conv: ConvSettings,
        backend: str,
        layer_idx: int | None,
        steps_per_token: int = 1,
    ):
        """``steps_per_token``: how many keys and values a token has in every head; they lie side by side, so that k is
        ``[B, T, H, steps * K]`` and v ``[B, T, HV, steps * V]``."""
        super().__init__(hidden_size, layer_idx, backend)
        if heads.values < 1 or heads.values % heads.keys != 0:
            raise ValueError(f"num_v_heads must be a multiple of num_heads={heads.keys}, got {heads.values}")
        self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = heads
        self.key_dim, self.value_dim = heads.keys * heads.key_dim, heads.values * heads.value_dim
        self.steps_per_token, self.use_short_conv, self.conv_size = steps_per_token, conv.used, conv.size
        keys, values = steps_per_token * self.key_dim, steps_per_token * self.value_dim
        self.q_proj = Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = Linear(hidden_size, keys, bias=False)
        self.v_proj = Linear(hidden_size, values, bias=False)
        if conv.used:
            self.q_conv1d = ShortConvolution(self.key_dim, conv.size, conv.bias)
            self.k_conv1d = ShortConvolution(keys, conv.size, conv.bias)
            self.v_conv1d = ShortConvolution(values, conv.size, conv.bias)

    def add_output(
        self, norm_eps: float, activation: str = "swish", use_gate: bool = True, gate_rank: int | None = None
    ) -> None:
        """The modules of ``output``; with ``gate_rank`` the gate's projection is of low rank."""
        self.o_proj = Linear(self.value_dim, self.hidden_size, bias=False)
        self.use_gate = use_gate
        if not use_gate:
            self.o_norm = RMSNorm(self.head_v_dim, norm_eps)
            return
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, activation)
        if gate_rank is None:
            self.g_proj = Linear(self.hidden_size, self.value_dim, bias=False)
        else:
            self.g_proj = low_rank(self.hidden_size, gate_rank, self.value_dim, bias=True)

    # ---------------------------------------------------------------- the rule

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        """The rule's arguments by name, for ``[B, T, ...]`` and for one token ``[B, ...]`` alike."""
        raise NotImplementedError

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        """o ``[B, T, HV, V]``; with a ``state``, starts from what it holds (if anything) and writes the new one."""
        return self.apply_rule(type(self).chunk_rule, self.rule_inputs(q, k, v, hidden_states), layout, state)

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        """o ``[B, HV, V]`` for one token per row; the held state is updated in place."""
        return self.apply_step(type(self).step_rule, self.rule_inputs(q, k, v, hidden_states), state)

    # ---------------------------------------------------------------- around the rule

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        if state is not None and state.is_decode_step():
            token = hidden_states[:, 0]
            o = self.step(*self._step_streams(token, state), token, state).unsqueeze(1)
        else:
            streams = self._streams(hidden_states, layout, state)
            o = run_pack(self.run, self.step, (*streams, hidden_states), layout, state)
        return self.output(o, hidden_states)

    def output(self, o: Tensor, hidden_states: Tensor) -> Tensor:
        """W_o (rmsnorm(o) * activation(W_g x)), or without ``use_gate`` W_o rmsnorm(o)."""
        if self.use_gate:
            gate = self.g_proj(hidden_states).unflatten(-1, (self.num_v_heads, -1))
            normed: Tensor = self.o_norm(o, gate)
        else:
            normed = self.o_norm(o)
        y: Tensor = self.o_proj(normed.flatten(-2))
        return y

    def _streams(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> Streams:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if not self.use_short_conv:
            return self._without_conv(q, k, v)
        streams = []
        for number, (stream, convolution) in enumerate(zip((q, k, v), self._convolutions())):
            before = None if state is None else state.conv(number)
            y, after = convolution(stream, layout, before, return_state=state is not None)
            if state is not None:
                state.write_conv(after, number)
            streams.append(y)
        return self._split_heads(*streams)

    def _step_streams(self, x: Tensor, state: LayerState) -> Streams:
        """The same for one token ``[B, D]``; the convolution states advance in place."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if not self.use_short_conv:
            return self._without_conv(q, k, v)
        streams = zip((q, k, v), self._convolutions())
        return self._split_heads(
            *(conv.step(x, state.held_conv(i), state.slots) for i, (x, conv) in enumerate(streams))
        )

    def _convolutions(self) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def _without_conv(self, q: Tensor, k: Tensor, v: Tensor) -> Streams:
        return (
            self._split_heads(F.silu(q), F.silu(k), F.silu(v)) if self.silu_without_conv else self._split_heads(q, k, v)
        )

    def _split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Streams:
        return Streams(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_v_heads, -1)),
        )

    # ---------------------------------------------------------------- facts

    def keep_part(self, ranks: int) -> None:
        check_heads_divide("num_heads", self.num_heads, ranks)
        self.num_heads, self.num_v_heads = self.num_heads // ranks, self.num_v_heads // ranks
        self.key_dim, self.value_dim = self.key_dim // ranks, self.value_dim // ranks

    def state_shapes(self) -> dict[str, StateShape]:
        return {"S": self.matrix_state(), **self.conv_state()}

    def matrix_state(self) -> StateShape:
        return StateShape((self.num_v_heads, self.head_k_dim, self.head_v_dim), torch.float32)

    def conv_state(self) -> dict[str, StateShape]:
        if not self.use_short_conv:
            return {}
        return {"conv": StateShape((self._conv_channels(), self.conv_size - 1), None)}

    def flops_per_token(self, context: int) -> int:
        return self.flops_per_entry * self.num_v_heads * self.head_k_dim * self.head_v_dim + self.conv_flops()

    def conv_flops(self) -> int:
        return 2 * self.conv_size * self._conv_channels() if self.use_short_conv else 0

    def _conv_channels(self) -> int:
        return self.key_dim + self.steps_per_token * (self.key_dim + self.value_dim)


def check_heads_divide(name: str, heads: int, ranks: int) -> None:
    if heads % ranks:
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(f"{name}={heads} cannot be shared by {ranks} ranks of tensor parallelism: it allows {allowed}")


def columns(*names: str) -> dict[str, str]:
    """A tensor plan in which projections to heads are cut by columns."""
    return dict.fromkeys(names, "colwise")


def low_rank(inputs: int, rank: int, outputs: int, bias: bool = False) -> nn.Sequential:
    """W_2 W_1 x, or W_2 W_1 x + b."""
    return nn.Sequential(Linear(inputs, rank, bias=False), Linear(rank, outputs, bias=bias))

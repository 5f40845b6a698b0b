"""What the mixers with one matrix state share: options from a config, and a first-order rule between two states.

A subclass names its two functions of ``mdn.ops.first_order`` (chunkwise, one token) and implements ``rule_inputs``,
which works for ``[B, T, ...]`` and for one token ``[B, ...]`` alike. The state ``[N, HV, K, V]`` is number 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mdn.layers.layout import TokenLayout
from mdn.layers.mixer import Mixer
from mdn.layers.projected_mixer import ProjectedMixer
from mdn.layers.state import LayerState

Rule = Callable[..., Any]


class BaselineMixer(Mixer):
    """A mixer whose constructor takes some fields of the config, and any of ``config.mixer_options`` by name."""

    config_fields: ClassVar[tuple[str, ...]] = ("hidden_size", "norm_eps", "backend")
    backend: str

    @classmethod
    def from_config(cls, config: Any, layer_idx: int) -> Self:
        return cls(**cls.options_from_config(config), layer_idx=layer_idx)

    @classmethod
    def options_from_config(cls, config: Any) -> dict[str, Any]:
        options = dict(getattr(config, "mixer_options", None) or {})
        known = [name for name in inspect.signature(cls).parameters if name != "layer_idx"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"mixer_options has unknown keys {unknown}; {cls.__name__} knows {known}")
        return {name: getattr(config, name) for name in cls.config_fields} | options

    def apply_rule(
        self, rule: Rule, inputs: dict[str, Tensor], layout: TokenLayout, state: LayerState | None, **options: Any
    ) -> Tensor:
        """o ``[B, T, HV, V]``, from the held state (if any) to the new one (if one is kept)."""
        before = None if state is None else state.recurrent(0)
        o, after = rule(
            **inputs,
            initial_state=before,
            output_final_state=state is not None,
            cu_seqlens=layout.boundaries,
            backend=self.backend,
            **options,
        )
        if state is not None:
            state.write_recurrent(after, 0)
        return o


class FirstOrderMixer(BaselineMixer, ProjectedMixer):
    """The shell of ``ProjectedMixer`` around a first-order rule."""

    chunk_rule: ClassVar[Rule]
    step_rule: ClassVar[Rule]
    flops_per_entry: ClassVar[int]
    """operations per entry of the state and token"""

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> dict[str, Any]:
        """The rule's arguments by name: vectors ``[..., heads, dim]`` and gates."""
        raise NotImplementedError

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None
    ) -> Tensor:
        return self.apply_rule(type(self).chunk_rule, self.rule_inputs(q, k, v, hidden_states), layout, state)

    def step(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, state: LayerState) -> Tensor:
        inputs = self.rule_inputs(q, k, v, hidden_states)
        return type(self).step_rule(**inputs, state=state.held_recurrent(0))

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        state = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return {"S": (state, torch.float32), **self.conv_state_shape()}

    def flops_per_token(self, context: int) -> int:
        return self.flops_per_entry * self.num_v_heads * self.head_k_dim * self.head_v_dim + self.conv_flops()


class SharedWidthMixer(FirstOrderMixer):
    """The heads share ``expand_k * hidden_size`` key and ``expand_v * hidden_size`` value dimensions."""

    def build_shared_width(
        self, hidden_size: int, num_heads: int, expand_k: float, expand_v: float, *convolutions: Any
    ) -> None:
        sizes = {"expand_k": expand_k * hidden_size / num_heads, "expand_v": expand_v * hidden_size / num_heads}
        for name, size in sizes.items():
            if size != int(size) or size < 1:
                raise ValueError(f"{name} * hidden_size / num_heads must be a positive integer, got {size}")
        head_dim, ratio = int(sizes["expand_k"]), sizes["expand_v"] / sizes["expand_k"]
        self.build_projections(hidden_size, num_heads, num_heads, head_dim, ratio, *convolutions)


class PlainStreams(SharedWidthMixer):
    """Without convolutions q, k and v are plain projections: no SiLU."""

    def _inputs(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> tuple[Tensor, Tensor, Tensor]:
        return super()._inputs(x, layout, state) if self.use_short_conv else self._plain(x)

    def _step_inputs(self, x: Tensor, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
        return super()._step_inputs(x, state) if self.use_short_conv else self._plain(x)

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._split_heads(self.q_proj(x), self.k_proj(x), self.v_proj(x))

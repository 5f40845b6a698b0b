"""Our mixers inside vLLM: they keep their parameters and computations, and vLLM schedules tokens and holds states.

Each wrapper takes the place of a mixer in a block, which calls it with the tokens of one step ``[tokens, D]`` and their
positions. For torch.compile and CUDA graphs the recurrent ones are a single opaque op, ``mdn::serve_mixer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention import Attention as CachedAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import AutoWeightsLoader

from mdn.layers import Attention, ChannelMixing, Mixer, TokenLayout
from mdn.ops.boundaries import SequenceBoundaries
from mdn.vllm.batch import StepLayouts, StepMetadata, recurrent_backend
from mdn.vllm.states import DecodeState, LayerStates, PrefillState


class ServedMixer(nn.Module):
    """What the wrappers share: weights have the names they would have without the wrapper."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer = mixer

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {f"mixer.{name}" for name in AutoWeightsLoader(self.mixer).load_weights(weights)}


# ----------------------------------------------------------------------------------------------------------- recurrent


class ServedRecurrence(ServedMixer, MambaBase):
    """A recurrent mixer, and the pages with its states and those of the block's channel mixing."""

    mixer: Mixer

    def __init__(self, mixer: Mixer, states: LayerStates, vllm_config: VllmConfig, name: str):
        super().__init__(mixer)
        self.states, self.name = states, name
        self.kv_cache: tuple[Tensor, ...] = tuple(torch.empty(0) for _ in states.all)
        _make_known(self, name, vllm_config)

    # ---------------------------------------------------------------- what vLLM asks

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(state.shape for state in self.states.all)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(state.dtype for state in self.states.all if state.dtype is not None)

    @property
    def mamba_type(self) -> Any:
        return recurrent_backend()

    # ---------------------------------------------------------------- one step

    def forward(self, hidden_states: Tensor, positions: Tensor, past_key_values: None = None) -> Tensor:
        return serve_mixer(hidden_states, self.name)

    def serve(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        return self.mix_with(self.mixer, hidden_states, context)

    def mix_with(self, mixer: Mixer | ChannelMixing, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        """``[tokens, D]`` to the same shape: all decoding requests in one call of the mixer, and all prompts in one."""
        layouts = context.additional_kwargs.setdefault("mdn_layouts", StepLayouts())
        if context.attn_metadata is None:  # vLLM measures the memory of a step; nothing is to be remembered
            layout = layouts.prefill(SequenceBoundaries.from_lengths([len(hidden_states)], hidden_states.device))
            return mixer.mix(hidden_states.unsqueeze(0), layout, None)[0]
        metadata: StepMetadata = context.attn_metadata[self.name]
        pages, convolutions = self.kv_cache, len(self.states.conv)
        slots = metadata.state_indices_tensor_d[:, 0].long()  # in a CUDA graph also rows that pad the batch
        rows, boundaries = len(slots), metadata.prefill_boundaries
        output = torch.zeros_like(hidden_states)
        if rows > 0:
            tokens = hidden_states[:rows].unsqueeze(1)
            output[:rows] = mixer.mix(tokens, layouts.decode(rows), DecodeState(pages, convolutions, slots))[:, 0]
        if boundaries is not None:
            slots, resumed = metadata.state_indices_tensor_p.long(), metadata.has_initial_states_p
            tokens = hidden_states[rows : rows + boundaries.total].unsqueeze(0)
            state = PrefillState(pages, convolutions, slots, resumed)
            output[rows : rows + boundaries.total] = mixer.mix(tokens, layouts.prefill(boundaries), state)[0]
        return output


class ServedChannelMixing(ServedMixer):
    """RWKV-7's channel mixing, whose state is on the pages of the block's mixer."""

    mixer: ChannelMixing

    def __init__(self, mixer: ChannelMixing, owner: ServedRecurrence, vllm_config: VllmConfig, name: str):
        super().__init__(mixer)
        self.owner, self.name = [owner], name  # in a list: its parameters belong to its own place in the block
        _make_known(self, name, vllm_config)

    def forward(self, hidden_states: Tensor, positions: Tensor, past_key_values: None = None) -> Tensor:
        return serve_mixer(hidden_states, self.name)

    def serve(self, hidden_states: Tensor, context: ForwardContext) -> Tensor:
        return self.owner[0].mix_with(self.mixer, hidden_states, context)


def _make_known(layer: ServedMixer, name: str, vllm_config: VllmConfig) -> None:
    """So that vLLM gives it pages and ``serve_mixer`` finds it by its name."""
    known = vllm_config.compilation_config.static_forward_context
    if name in known:
        raise ValueError(f"vLLM already has a layer of the name {name!r}")
    known[name] = layer


@torch.library.custom_op("mdn::serve_mixer", mutates_args=())
def serve_mixer(hidden_states: Tensor, name: str) -> Tensor:
    """The tokens of the current step through the layer ``name``.

    It also writes the layer's pages. They are no arguments: no graph holds them, and every caller of the op depends on
    the output of the one before, which keeps their order.
    """
    context = get_forward_context()
    output: Tensor = context.no_compile_layers[name].serve(hidden_states, context)
    return output


@serve_mixer.register_fake
def _(hidden_states: Tensor, name: str) -> Tensor:
    return torch.empty_like(hidden_states)


# ----------------------------------------------------------------------------------------------------------- attention


class ServedAttention(ServedMixer):
    """Our projections and rotation around vLLM's attention, which keeps keys and values in its own pages."""

    mixer: Attention

    def __init__(self, mixer: Attention, vllm_config: VllmConfig, name: str):
        super().__init__(mixer)
        self.attention = CachedAttention(
            mixer.num_heads,
            mixer.head_dim,
            mixer.head_dim**-0.5,
            mixer.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.window_size,
            prefix=name,
        )

    def forward(self, hidden_states: Tensor, positions: Tensor, past_key_values: None = None) -> Tensor:
        layout = TokenLayout((1, hidden_states.shape[0]), positions=positions.unsqueeze(0))
        q, k, v = (x.flatten(-2)[0] for x in self.mixer.heads(hidden_states.unsqueeze(0), layout))
        return self.mixer.o_proj(self.attention(q, k, v))

"""Our mixers inside vLLM: they keep their parameters and computations, and vLLM schedules tokens and holds states.

Each wrapper takes the place of a mixer in a block, which calls it with the tokens of one step ``[tokens, D]`` and their
positions. For torch.compile and CUDA graphs the recurrent ones are a single opaque op, ``mdn::serve_mixer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention import Attention as CachedAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from mdn.layers import Attention, ChannelMixing, Mixer, TokenLayout
from mdn.layers.cache_access import MixedPack
from mdn.ops.boundaries import SequenceBoundaries
from mdn.vllm import RECURRENT_BACKEND
from mdn.vllm.batch import StepLayouts, StepMetadata
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
        return self.states.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.states.dtypes

    @property
    def mamba_type(self) -> Any:
        return MambaAttentionBackendEnum[RECURRENT_BACKEND]

    # ---------------------------------------------------------------- one step

    def forward(self, hidden_states: Tensor, positions: Tensor, past_key_values: None = None) -> Tensor:
        return _served(hidden_states, self.name)

    def serve(self, hidden_states: Tensor, output: Tensor, context: ForwardContext) -> None:
        self.mix_with(self.mixer, hidden_states, output, context)

    def mix_with(
        self, mixer: Mixer | ChannelMixing, hidden_states: Tensor, output: Tensor, context: ForwardContext
    ) -> None:
        """``[tokens, D]`` to the same shape, in one call of the mixer for all requests."""
        layouts = context.additional_kwargs.setdefault("mdn_layouts", StepLayouts())
        if context.attn_metadata is None:  # vLLM measures the memory of a step; nothing is to be remembered
            layout = layouts.all(SequenceBoundaries.from_lengths([len(hidden_states)], hidden_states.device))
            output.copy_(mixer.mix(hidden_states.unsqueeze(0), layout, None)[0])
            return
        metadata: StepMetadata = context.attn_metadata[self.name]
        boundaries = metadata.boundaries
        if boundaries is None:
            tokens = len(metadata.decoding_slots)
            state = DecodeState(self.kv_cache, len(self.states.conv), metadata.decoding_slots)
            mixed = mixer.mix(hidden_states[:tokens].unsqueeze(1), layouts.decode(tokens), state).squeeze(1)
        else:
            tokens = boundaries.all.total
            layout = layouts.all(boundaries.all)
            mixed = mixer.mix(hidden_states[:tokens].unsqueeze(0), layout, self._pack_state(metadata, layouts))[0]
        output[:tokens].copy_(mixed)
        output[tokens:].zero_()  # rows that pad the batch

    def _pack_state(self, metadata: StepMetadata, layouts: StepLayouts) -> PrefillState:
        pages, convolutions = self.kv_cache, len(self.states.conv)
        if metadata.num_decodes == 0:
            return PrefillState(pages, convolutions, metadata.prompt_slots, metadata.has_initial_states_p)
        assert metadata.boundaries is not None
        state = PrefillState(pages, convolutions, metadata.slots, metadata.resumed)
        state.mixed = MixedPack(
            metadata.num_decodes,
            DecodeState(pages, convolutions, metadata.decoding_slots),
            PrefillState(pages, convolutions, metadata.prompt_slots, metadata.has_initial_states_p),
            layouts.prompts(metadata.boundaries.prompts),
        )
        return state


class ServedChannelMixing(ServedMixer):
    """RWKV-7's channel mixing, whose state is on the pages of the block's mixer."""

    mixer: ChannelMixing

    def __init__(self, mixer: ChannelMixing, owner: ServedRecurrence, vllm_config: VllmConfig, name: str):
        super().__init__(mixer)
        self.owner, self.name = [owner], name  # in a list: its parameters belong to its own place in the block
        _make_known(self, name, vllm_config)

    def forward(self, hidden_states: Tensor, positions: Tensor, past_key_values: None = None) -> Tensor:
        return _served(hidden_states, self.name)

    def serve(self, hidden_states: Tensor, output: Tensor, context: ForwardContext) -> None:
        self.owner[0].mix_with(self.mixer, hidden_states, output, context)


def _make_known(layer: ServedMixer, name: str, vllm_config: VllmConfig) -> None:
    """So that vLLM gives it pages and ``serve_mixer`` finds it by its name."""
    known = vllm_config.compilation_config.static_forward_context
    if name in known:
        raise ValueError(f"vLLM already has a layer of the name {name!r}")
    known[name] = layer


def _served(hidden_states: Tensor, name: str) -> Tensor:
    output = torch.empty_like(hidden_states)
    torch.ops.mdn.serve_mixer(hidden_states, output, name)
    return output


def _serve_mixer(hidden_states: Tensor, output: Tensor, name: str) -> None:
    """The tokens of the current step through the layer ``name``, into ``output``.

    Compiled graphs end before this op and continue after it (``mdn.vllm.register``), as with vLLM's own layers. That
    decides its form:

    - ``output`` is an argument, allocated by the graph before. The next graph, if it is a CUDA graph, reads the address
      that it was captured with; a tensor made in here would have another address in every step.
    - The op also writes the layer's pages, which are no arguments: no graph contains or reads them, only this op does.
      That it declares to write ``output`` is enough for torch.compile neither to drop, merge nor reorder its calls.
    """
    context = get_forward_context()
    context.no_compile_layers[name].serve(hidden_states, output, context)


def _serve_mixer_fake(hidden_states: Tensor, output: Tensor, name: str) -> None:
    return None


_LIBRARY = Library("mdn", "FRAGMENT")
"""the op lives as long as this object"""
direct_register_custom_op(
    op_name="serve_mixer",
    op_func=eager_break_during_capture(_serve_mixer),
    mutates_args=["output"],
    fake_impl=_serve_mixer_fake,
    target_lib=_LIBRARY,
)


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

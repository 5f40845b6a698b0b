"""The language model of ``mdn.models`` inside vLLM: the same blocks, with vLLM's embedding, head and cached layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix

from mdn.layers import Attention, ChannelMixing
from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.modeling import MomentumDeltaNetBlock, make_norm
from mdn.vllm.served_mixers import ServedAttention, ServedChannelMixing, ServedRecurrence
from mdn.vllm.states import LayerStates, recurrent_states


def served_block(layer_idx: int, states: LayerStates, vllm_config: VllmConfig, name: str) -> MomentumDeltaNetBlock:
    """A block whose token mixing goes through vLLM; its weights are still to be loaded."""
    device = torch.get_default_device()  # vLLM sets it
    with torch.device("meta"):  # initial values would be thrown away, and some need float32
        block = MomentumDeltaNetBlock(vllm_config.model_config.hf_config, layer_idx)
    block.to_empty(device=device)
    mixer, mlp = block.attn, getattr(block, "mlp", None)
    for parameter in mixer.no_weight_decay:  # small and exponentiated: float32, as in mdn.models
        if getattr(mixer, parameter, None) is not None:
            getattr(mixer, parameter).data = getattr(mixer, parameter).data.float()
    if isinstance(mixer, Attention):
        served: nn.Module = ServedAttention(mixer, vllm_config, f"{name}.attn")
    else:
        served = ServedRecurrence(mixer, states, vllm_config, f"{name}.attn")
        if isinstance(mlp, ChannelMixing):
            block.mlp = ServedChannelMixing(mlp, served, vllm_config, f"{name}.mlp")
    block.add_module("attn", served)
    return block


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class ServedModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: MomentumDeltaNetConfig = vllm_config.model_config.hf_config
        states = _states(vllm_config)
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            served_block(i, states, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states ``[tokens, D]`` of the tokens of one step."""
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.layers:
            hidden_states = block(hidden_states, positions)  # positions: all that our wrappers want of a layout
        return self.norm(hidden_states)


class ServedTransformer(nn.Module):
    """A model whose layers are all attention."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config: MomentumDeltaNetConfig = vllm_config.model_config.hf_config
        self.model = ServedModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embeddings)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


class ServedForCausalLM(ServedTransformer, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """A model with recurrent layers. To vLLM it is a hybrid, even if it has no attention layers."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    supports_mamba_prefix_caching: ClassVar[Literal[True]] = True

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return _states(vllm_config).shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return _states(vllm_config).dtypes

    def get_mamba_state_copy_funcs(self, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """A cached prefix is continued on a copy of its page: every state is copied whole."""
        count = len(recurrent_states(self.config, torch.float32).all)
        return dict.fromkeys(mamba_types, (get_temporal_copy_spec,) * count)


def _states(vllm_config: VllmConfig) -> LayerStates:
    return recurrent_states(vllm_config.model_config.hf_config, vllm_config.model_config.dtype)

"""The language model: pre-norm blocks of (mixer, SwiGLU MLP) between an embedding and a linear head.

    h = embed(ids);   per block: h = h + mixer(norm(h)), h = h + mlp(norm(h));   logits = W norm(h)

One backbone for every mixer and for hybrids. Padding is removed once per call, before the first block, and put back
after the last one; between them all layers see only tokens. Module names are those of the authors' checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mdn.layers import MIXERS, ChannelMixing, Mixer, RMSNorm, TokenLayout
from mdn.layers.initialisers import initialise
from mdn.models import cache as _registers_the_cache_layer  # noqa: F401
from mdn.models.configuration import MomentumDeltaNetConfig
from mdn.models.layout import make_layout
from mdn.models.loss import chunked_linear_cross_entropy, shift_labels_left


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def make_norm(config: MomentumDeltaNetConfig) -> nn.Module:
    kind = RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, config.norm_eps)


class MomentumDeltaNetBlock(GradientCheckpointingLayer):
    """``attn`` is the mixer, whichever it is: the name that the checkpoints use."""

    def __init__(self, config: MomentumDeltaNetConfig, layer_idx: int):
        super().__init__()
        if config.norm_embeddings and layer_idx == 0:
            self.pre_norm = make_norm(config)
        self.attn_norm = make_norm(config)
        self.attn: Mixer = MIXERS[config.mixer_name(layer_idx)].from_config(config, layer_idx)
        self.use_mlp = config.use_mlp
        if config.use_mlp:
            self.mlp_norm = make_norm(config)
            self.mixes_tokens = config.mlp == "rwkv7" and self.attn.cache_type == "recurrent_state"
            self.mlp: nn.Module = (
                ChannelMixing(config.hidden_size, config.mlp_size, layer_idx, config.num_hidden_layers)
                if self.mixes_tokens
                else GatedMLP(config.hidden_size, config.mlp_size)
            )

    def forward(self, hidden_states: Tensor, layout: TokenLayout, past_key_values: Cache | None = None) -> Tensor:
        if hasattr(self, "pre_norm"):
            hidden_states = self.pre_norm(hidden_states)
        hidden_states = hidden_states + self.attn(self.attn_norm(hidden_states), layout, past_key_values)
        if self.use_mlp:
            context = (layout, past_key_values) if self.mixes_tokens else ()
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states), *context)
        return hidden_states


class MomentumDeltaNetPreTrainedModel(PreTrainedModel):
    config_class = MomentumDeltaNetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MomentumDeltaNetBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # a recurrent state cannot go back: transformers refuses assisted decoding
    _supports_sdpa = True
    # Small, and exponentiated: they stay float32 when the model is loaded in bfloat16 or float16.
    _keep_in_fp32_modules_strict = sorted({name for mixer in MIXERS.values() for name in mixer.no_weight_decay})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config, keep=lambda parameter: getattr(parameter, "_is_hf_initialized", False))

    def no_weight_decay_names(self) -> list[str]:
        """Parameters that the authors mark as not decayed: the gates' per-head scales and biases."""
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.named_modules()
            if isinstance(module, Mixer)
            for name in module.no_weight_decay
            if getattr(module, name, None) is not None
        ]


class MomentumDeltaNetModel(MomentumDeltaNetPreTrainedModel):
    def __init__(self, config: MomentumDeltaNetConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(MomentumDeltaNetBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.has_attention = any(config.mixer_name(i) == "attention" for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        layout: TokenLayout | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states ``[B, T, D]``; see ``layout_of`` for the ways to say where the tokens are."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions=True is not supported: recurrent mixers have no attention weights")
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if layout is None:
            layout = self.layout_of(hidden_states, attention_mask, position_ids, past_key_values, **kwargs)
        past_key_values = self._cache(past_key_values, use_cache, layout)
        states = []
        hidden_states = layout.enter(hidden_states)
        for layer in self.layers:
            if output_hidden_states:
                states.append(layout.leave(hidden_states))
            hidden_states = layer(hidden_states, layout, past_key_values=past_key_values)
        hidden_states = layout.leave(self.norm(hidden_states))
        if past_key_values is not None:
            for cache_layer in past_key_values.layers:
                if hasattr(cache_layer, "advance"):
                    cache_layer.advance(layout.shape[1])
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,  # type: ignore[arg-type]
            past_key_values=past_key_values,
            hidden_states=(*states, hidden_states) if output_hidden_states else None,  # type: ignore[arg-type]
        )

    def layout_of(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        all_tokens_valid: bool = False,
        **kwargs: Any,
    ) -> TokenLayout:
        """Where the tokens of a call with ``tokens [B, T, ...]`` are.

        ``attention_mask [B, past + T]`` marks tokens with 1. A pack is one row with ``cu_seqlens`` (or the Trainer's
        ``cu_seq_lens_q``) or with ``position_ids`` that restart. ``all_tokens_valid=True`` promises that no new token
        is masked.
        """
        return make_layout(
            (tokens.shape[0], tokens.shape[1]),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
            past_key_values=past_key_values,
            has_attention=self.has_attention,
            all_tokens_valid=all_tokens_valid,
        )

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None, layout: TokenLayout) -> Cache | None:
        """The cache to fill: the given one, or a new one if wanted; none in training or for packs."""
        if past_key_values is not None:
            if self.training and self.is_gradient_checkpointing:
                raise ValueError("past_key_values cannot be used in training with gradient checkpointing")
            return past_key_values
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        packed_by_caller = layout.boundaries is not None and not layout.unpadded
        if not use_cache or packed_by_caller or (self.training and self.is_gradient_checkpointing):
            return None
        return DynamicCache(config=self.config)


class MomentumDeltaNetForCausalLM(MomentumDeltaNetPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: MomentumDeltaNetConfig):
        super().__init__(config)
        self.model = MomentumDeltaNetModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, V]`` and, with ``labels [B, T]`` (shifted here), the loss.

        With ``config.loss_chunk_size`` and labels the logits are never built and the output's ``logits`` is None.
        Further arguments: ``cu_seqlens`` (see ``MomentumDeltaNetModel.layout_of``) and ``num_items_in_batch``.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        layout = self.model.layout_of(tokens, attention_mask, position_ids, past_key_values, **kwargs)
        outputs = self.model(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            layout=layout,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss, logits = None, None
        if labels is None or self.config.loss_chunk_size is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
        if labels is not None:
            loss = self._loss(hidden_states, logits, labels, attention_mask, layout, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _loss(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        attention_mask: Tensor | None,
        layout: TokenLayout,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Mean cross entropy of the next token, or its sum over ``num_items_in_batch``. Masked tokens do not count, and
        the last token of a packed sequence does not predict the first of the next."""
        if shift_labels is None:
            valid = (
                attention_mask[:, -labels.shape[1] :].bool() if layout.unpadded and attention_mask is not None else None
            )
            last = (
                layout.boundaries.cu_seqlens[1:] - 1 if layout.boundaries is not None and not layout.unpadded else None
            )
            shift_labels = shift_labels_left(labels, valid, last)
        if logits is None:
            chunk_size = self.config.loss_chunk_size
            return chunked_linear_cross_entropy(
                hidden_states, self.lm_head.weight, shift_labels, chunk_size, num_items_in_batch
            )
        return self.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=self.vocab_size,
            shift_labels=shift_labels.contiguous(),
            num_items_in_batch=num_items_in_batch,
        )

    # ---------------------------------------------------------------- generation

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """``generate`` asks for masks by layer type; this model reads the plain ``[B, T]`` one."""
        return attention_mask

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,  # named here because generate() looks for it
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        kwargs |= {"next_sequence_length": next_sequence_length, "is_first_iteration": is_first_iteration}
        kwargs |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        inputs = super().prepare_inputs_for_generation(**kwargs)  # type: ignore[misc]
        # A token that was just generated is never padding, so a decode step need not look at the mask. (Only the
        # decoding loop says how many tokens are new without calling it the first iteration; chunked prefill does not.)
        if next_sequence_length == 1 and not is_first_iteration:
            inputs["all_tokens_valid"] = True
        return inputs

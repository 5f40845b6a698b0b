"""The language model: pre-norm blocks of (mixer, SwiGLU MLP) between an embedding and a linear head.

    h = embed(ids);   per block: h = h + mixer(norm(h)), h = h + mlp(norm(h));   logits = W norm(h)

One backbone for every mixer and for hybrids. Padding is removed once per call, before the first block, and put back
after the last one; between them all layers see only tokens. Module names are those of the authors' checkpoints.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from mdn.common.files import share
from mdn.layers import MIXERS, ChannelMixing, Mixer, RMSNorm, TokenLayout, make_layout
from mdn.layers.init import initialise
from mdn.layers.linear import Linear, Packed, PackedLinear
from mdn.layers.mixer import RECURRENT_LAYER_TYPE
from mdn.models import cache as _registers_the_cache_layer  # noqa: F401
from mdn.models.call_checks import (
    check_batch,
    check_embeds_dtype,
    check_finished,
    check_labels,
    check_lengths,
    check_tokens,
    mark_in_use,
    refuse_sequence_parallelism,
    unmark,
)
from mdn.models.config import MomentumDeltaNetConfig, check_weight_format
from mdn.models.decode_program import can_record, run_step
from mdn.models.loss import chunked_linear_cross_entropy, shift_labels_left
from mdn.models.quantize import pack_modules
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.fused import IGNORE_INDEX, cross_entropy_sum, is_native, swiglu
from mdn.parallel import tensor as _registers_the_styles  # noqa: F401

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

logger = logging.get_logger(__name__)


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    reads_same_input: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


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
            self.mixes_tokens = config.mlp == "rwkv7" and self.attn.cache_type == RECURRENT_LAYER_TYPE
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
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch
    _no_split_modules = ["MomentumDeltaNetBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # a recurrent state cannot go back: transformers refuses assisted decoding
    _supports_sdpa = True

    def post_init(self) -> None:
        if self.config.weight_format is not None:
            pack_modules(self, self.config.weight_format, fill=False)
        # The gates' parameters are small, and exponentiated: they stay float32 when the model is loaded in bfloat16.
        self._keep_in_fp32_modules_strict = {name.rpartition(".")[2] for name in self.no_weight_decay_names()}
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config, keep=lambda parameter: getattr(parameter, "_is_hf_initialized", False))

    def no_weight_decay_names(self) -> list[str]:
        """The gates' per-head scales and biases (``Mixer.no_weight_decay``), which the authors mark as not decayed."""
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.named_modules()
            if isinstance(module, Mixer)
            for name in module.no_weight_decay
            if getattr(module, name, None) is not None
        ]

    def quantize(self, weight_format: str) -> Self:
        """Rounds every linear layer and the embedding to ``bf16``, ``int8`` or ``int4``, in place, for inference on a
        CPU. What is left becomes float32. Returns the model; ``save_pretrained`` and ``from_pretrained`` keep the
        format."""
        check_weight_format(weight_format)
        if self.config.weight_format is not None:
            raise ValueError(f"the weights are {self.config.weight_format} already: quantise the original model")
        pack_modules(self.float(), weight_format, fill=True)
        self.config.weight_format = weight_format
        self.all_tied_weights_keys = {}  # of transformers, for parameters; see tie_weights
        self.tie_weights()
        return self

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """transformers' map of tied parameters; packed weights are buffers, which the head shares by itself."""
        if self.config.weight_format is not None:
            return {}
        tied: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)
        return tied

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        super().tie_weights(*args, **kwargs)
        head, embeddings = self.get_output_embeddings(), self.get_input_embeddings()
        if isinstance(head, PackedLinear) and isinstance(embeddings, Packed) and self.config.tie_word_embeddings:
            head.share_weights_of(embeddings)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers, but a form that would lose gradients is refused."""
        shares = any(isinstance(module, Mixer) and module.shares_values for module in self.modules())
        if shares and (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                f"use_reentrant=True loses gradients with mixer={self.config.mixer!r}, whose layers share values; "
                "give gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Files get the permissions that the umask allows (safetensors' own are readable by their owner only)."""
        super().save_pretrained(save_directory, *args, **kwargs)
        share(Path(save_directory), "*.safetensors")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do, see ``MomentumDeltaNetConfig.register_for_auto_class``."""


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
        output_attentions: bool | None = None,
        layout: TokenLayout | None = None,
        **where: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states ``[B, T, D]``; see ``layout_of`` for the ways to say where the tokens are (``where``)."""
        tokens = check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
        self._refuse_unsupported(output_attentions)
        if past_key_values is not None and inputs_embeds is not None and not torch.compiler.is_compiling():
            packed = self.config.weight_format is not None and not self.has_attention
            check_embeds_dtype(inputs_embeds, self.dtype, packed)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = self._embed(tokens) if inputs_embeds is None else inputs_embeds
        if layout is None:
            refuse_unknown(self, where)
            layout = self.layout_of(hidden_states, attention_mask, position_ids, past_key_values, **where)
        past_key_values = self._cache(past_key_values, use_cache, layout)
        marks = past_key_values is not None and not torch.compiler.is_compiling()
        if marks:  # nothing about the arguments may be refused any more
            mark_in_use(past_key_values)
        states: list[Tensor] = []
        is_step = past_key_values is not None and layout.boundaries is None and not output_hidden_states
        if is_step and can_record(hidden_states, past_key_values):
            hidden_states = run_step(
                self, lambda x: self._run_layers(x, layout, past_key_values), hidden_states, past_key_values
            )
        else:
            hidden_states = self._run_layers(
                hidden_states, layout, past_key_values, states if output_hidden_states else None
            )
        if past_key_values is not None:
            for cache_layer in past_key_values.layers:
                if hasattr(cache_layer, "advance"):
                    cache_layer.advance(layout.shape[1])
        if marks:
            unmark(past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,  # type: ignore[arg-type]
            past_key_values=past_key_values,
            hidden_states=(*states, hidden_states) if output_hidden_states else None,  # type: ignore[arg-type]
        )

    def _embed(self, input_ids: Tensor) -> Tensor:
        try:
            return self.embeddings(input_ids)
        except IndexError:
            low, high = int(input_ids.min()), int(input_ids.max())
            expected = f"input_ids must lie in 0..{self.embeddings.num_embeddings - 1} (the vocabulary of this model)"
            raise IndexError(f"{expected}, got {low}..{high}") from None

    def _run_layers(
        self, hidden_states: Tensor, layout: TokenLayout, past_key_values: Any, states: list[Tensor] | None = None
    ) -> Tensor:
        """All blocks and the last norm; ``states`` receives the input of every block."""
        hidden_states = layout.enter(hidden_states)
        for layer in self.layers:
            if states is not None:
                states.append(layout.leave(hidden_states))
                hidden_states = layout.enter(states[-1])  # through the returned tensor, so that it receives gradients
            hidden_states = layer(hidden_states, layout, past_key_values=past_key_values)
        return layout.leave(self.norm(hidden_states))

    def layout_of(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        *,
        cu_seqlens: Tensor | SequenceBoundaries | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        all_tokens_valid: bool = False,
        context_parallel: ContextParallelPlan | None = None,
    ) -> TokenLayout:
        """Where the tokens of a call with ``tokens [B, T, ...]`` are.

        ``attention_mask [B, past + T]`` marks tokens with 1. A pack is one row with ``cu_seqlens [N + 1]``, with
        ``seq_idx [1, T]`` (the number of each token's sequence) or with ``position_ids`` that restart; the Trainer's
        collator writes ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (which must agree) and lengths that follow from them.
        ``all_tokens_valid=True`` promises that no new token is masked. With ``context_parallel`` the tokens are one
        rank's, ``[1, T]``, of a pack that the plan describes.
        """
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None and not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal: queries and keys are the same tokens")
        if self.has_attention and isinstance(past_key_values, StaticCache):
            raise ValueError(
                "past_key_values: attention layers here need a DynamicCache(config=model.config), not a StaticCache"
            )
        if past_key_values is not None:
            check_finished(past_key_values)
        if self.has_attention and past_key_values is not None and not torch.compiler.is_compiling():
            check_lengths(past_key_values)
        layout = make_layout(
            (tokens.shape[0], tokens.shape[1]),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
            seq_idx=seq_idx,
            past_length=None if past_key_values is None else past_key_values.get_seq_length(),
            has_attention=self.has_attention,
            all_tokens_valid=all_tokens_valid,
            context_parallel=context_parallel,
        )
        if past_key_values is not None and not torch.compiler.is_compiling():
            check_batch(past_key_values, layout)
        return layout

    def _refuse_unsupported(self, output_attentions: bool | None) -> None:
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions=True is not supported: recurrent mixers have no attention weights")
        if not torch.compiler.is_compiling():
            refuse_sequence_parallelism()

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None, layout: TokenLayout) -> Cache | None:
        """The cache to fill: the given one, or a new one if ``use_cache`` (default: the config's, not in training)."""
        recomputes = self.training and self.is_gradient_checkpointing
        if past_key_values is not None:
            if recomputes:
                raise ValueError("past_key_values cannot be used in training with gradient checkpointing")
            return past_key_values
        if use_cache and layout.packed_by_caller:
            raise ValueError("use_cache=True cannot continue a pack; pad the batch and give attention_mask")
        if use_cache and recomputes:
            logger.warning_once("use_cache=True has no effect in training with gradient checkpointing")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache and not (layout.packed_by_caller or recomputes) else None


class MomentumDeltaNetForCausalLM(MomentumDeltaNetPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: MomentumDeltaNetConfig):
        super().__init__(config)
        self.model = MomentumDeltaNetModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
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
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        # These two are named because the Trainer drops columns of its data that are no parameters here.
        cu_seqlens: Tensor | SequenceBoundaries | None = None,
        seq_idx: Tensor | None = None,
        **where: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, V]`` and, with ``labels [B, T]`` (shifted here) or ``shift_labels [B, T]``, the loss.

        The loss is a mean over the labelled tokens, or a sum divided by ``num_items_in_batch``; with
        ``context_parallel`` over those of all ranks, while gradients are those of this rank's tokens. With
        ``config.loss_chunk_size`` and labels the logits are never built and the output's ``logits`` is None, see
        ``_chunks_loss``. ``cu_seqlens``, ``seq_idx`` and ``where`` are those of ``MomentumDeltaNetModel.layout_of``.
        """
        # Not in the signature: the Trainer takes every parameter with "label" in its name for a column of its data,
        # and reports no eval_loss where one is missing.
        shift_labels: Tensor | None = where.pop("shift_labels", None)
        tokens = check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
        refuse_unknown(self, where)
        where |= {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        layout = self.model.layout_of(tokens, attention_mask, position_ids, past_key_values, **where)
        wants_loss = labels is not None or shift_labels is not None
        if wants_loss and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("logits_to_keep cannot be combined with labels: the loss needs all logits")
        if shift_labels is None and labels is not None:
            shift_labels = self._shifted(labels, attention_mask, layout)
        elif shift_labels is not None:
            check_labels("shift_labels", shift_labels, layout)
        outputs = self.model(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            layout=layout,
            return_dict=True,
        )
        hidden_states = outputs.last_hidden_state
        loss, logits = None, None
        if shift_labels is None or not self._chunks_loss():
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
        if shift_labels is not None:
            loss = self._loss(hidden_states, logits, shift_labels, num_items_in_batch, layout)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _shifted(self, labels: Tensor, attention_mask: Tensor | None, layout: TokenLayout) -> Tensor:
        """Each token's label is the next token. Masked tokens do not count, and the last token of a packed sequence
        does not predict the first of the next."""
        check_labels("labels", labels, layout)
        plan = layout.context_parallel
        if plan is not None:  # the label of a range's last token is the first of the next range
            ends = plan.documents.cu_seqlens[1:] - 1
            return plan.scatter(shift_labels_left(plan.gather(labels), last=ends))
        valid, last = None, None
        if layout.unpadded and attention_mask is not None:
            valid = attention_mask[:, -labels.shape[1] :].bool()
        elif layout.boundaries is not None:
            last = layout.boundaries.to(labels.device).cu_seqlens[1:] - 1
        return shift_labels_left(labels, valid, last)

    def _chunks_loss(self) -> bool:
        """Whether the loss can be computed in pieces from the head's weight, without calling the head.

        A head that does more than to multiply by it (an adapter, a bias, a hook, weights that accelerate brings when it
        is called) is called, and so is a ``loss_function`` of the user's own.
        """
        head = self.lm_head
        is_matrix = (
            type(head) in (Linear, nn.Linear, PackedLinear) and head.bias is None and "forward" not in vars(head)
        )
        hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
        is_bare = is_matrix and not any(hooks)
        return self.config.loss_chunk_size is not None and is_bare and self.loss_function is ForCausalLMLoss

    def _loss(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | int | None,
        layout: TokenLayout,
    ) -> Tensor:
        plan = layout.context_parallel
        if plan is not None and num_items_in_batch is None:
            num_items_in_batch = plan.count((shift_labels != IGNORE_INDEX).sum())
        loss: Tensor
        if logits is None:
            chunk_size = self.config.loss_chunk_size
            loss = chunked_linear_cross_entropy(
                hidden_states, self.lm_head.weight, shift_labels, chunk_size, num_items_in_batch
            )
        elif self.loss_function is ForCausalLMLoss and is_native(logits):
            total = cross_entropy_sum(logits.flatten(0, -2), shift_labels.flatten())
            count = (shift_labels != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
            loss = total / count
        else:
            loss = self.loss_function(
                logits=logits,
                labels=None,
                vocab_size=self.vocab_size,
                shift_labels=shift_labels.contiguous(),
                num_items_in_batch=num_items_in_batch,
            )
        return loss if plan is None else plan.global_loss(loss)

    # ---------------------------------------------------------------- generation

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """``generate`` requests masks by layer type; this model reads the plain ``[B, T]`` one."""
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
        inputs.pop("tokenizer", None)  # which generate() needs for stop_strings and passes on to the model
        # A token that was just generated is never padding, so a decode step need not look at the mask. (Only the
        # decoding loop says how many tokens are new without calling it the first iteration; chunked prefill does not.)
        if next_sequence_length == 1 and not is_first_iteration:
            inputs["all_tokens_valid"] = True
        return inputs


LAYOUT_ARGUMENTS = frozenset(inspect.signature(MomentumDeltaNetModel.layout_of).parameters)


def refuse_unknown(model: nn.Module, where: dict[str, Any]) -> None:
    unknown = sorted(where.keys() - LAYOUT_ARGUMENTS)
    if unknown:
        raise TypeError(f"{type(model).__name__}.forward() got unknown arguments: {', '.join(unknown)}")

"""What vLLM wants to know about a model before it is built, and what is refused."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import HybridAttentionMambaModelConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from mdn.layers.mixer import RECURRENT_LAYER_TYPE
from mdn.models.config import LARGEST_SIZE
from mdn.vllm import WITHOUT_STATES


class ArchitectureFacts(ModelArchConfigConvertorBase):
    """The sizes of the attention layers, which in a hybrid differ from those of the recurrent ones."""

    def get_architectures(self) -> list[str]:
        recurrent = RECURRENT_LAYER_TYPE in self.hf_config.layer_types
        return super().get_architectures() if recurrent else [WITHOUT_STATES]

    def get_total_num_attention_heads(self) -> int:
        config = self.hf_config
        return config.num_heads if config.attn is None else config.attn["num_heads"]

    def get_total_num_kv_heads(self) -> int:
        config = self.hf_config
        return (config.num_kv_heads or config.num_heads) if config.attn is None else config.attn["num_kv_heads"]

    def get_head_size(self) -> int:
        return self.hf_config.hidden_size // self.get_total_num_attention_heads()

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        """The training context by default. ``--max-model-len`` may be longer: nothing in the model limits it."""
        self.hf_config.model_max_length = LARGEST_SIZE  # where vLLM looks for the longest allowed context
        return self.hf_config.max_position_embeddings, "max_position_embeddings"


class ServingRules(HybridAttentionMambaModelConfig):
    """vLLM's rules for models with recurrent layers, after a check for what these models cannot do."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        if reasons := unsupported(vllm_config):
            raise ValueError(f"Momentum DeltaNet models in vLLM: {'; '.join(reasons)}")
        if vllm_config.model_config.is_hybrid:
            vllm_config.cache_config.mamba_ssm_cache_dtype = "float32"  # S and M; vLLM's "auto" warns on some CPUs
            super().verify_and_update_config(vllm_config)


def unsupported(vllm_config: Any) -> list[str]:
    """What this configuration requests that is not supported."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    found = []
    if vllm_config.speculative_config is not None:
        found.append(
            "speculative decoding is not supported, because a recurrent state cannot be rolled back to an earlier "
            "token; remove --speculative-config"
        )
    for kind in ("tensor", "pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{kind}_parallel_size")
        if size > 1:
            found.append(
                f"{kind}_parallel_size={size} is not supported: every worker holds the whole model; start one server "
                "per device"
            )
    if vllm_config.lora_config is not None:
        found.append("LoRA adapters are not supported; merge them into the model's weights, and remove --enable-lora")
    if model.quantization is not None:
        found.append(f"quantization={model.quantization!r} is not supported; remove --quantization")
    weight_format = model.hf_config.weight_format
    if weight_format is not None:
        found.append(f"packed weights ({weight_format}) are for mdn generate; serve the model they were made from")
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        if getattr(cache, name) not in ("auto", "float32"):
            found.append(f"{name}={getattr(cache, name)!r} is not supported: recurrent states are float32; use auto")
    return found

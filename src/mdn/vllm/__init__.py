"""The vLLM plug-in: ``vllm serve DIRECTORY`` for every model of ``mdn.models``.

vLLM finds ``register`` through the entry point ``vllm.general_plugins`` of this distribution and calls it in each of
its processes. Nothing else imports this package, so without vLLM it costs nothing.

| file | what it holds |
|---|---|
| states | what a layer remembers of a sequence, and the pages of vLLM's pool that hold it |
| batch | the metadata of one step: which tokens decode, which are parts of prompts, and whose pages they use |
| served_mixers | our mixers between vLLM's scheduler and its pages |
| served_model | the language model made of them |
| facts | what vLLM wants to know before the model is built, and what is refused |
"""

from __future__ import annotations

ARCHITECTURE = "MomentumDeltaNetForCausalLM"
WITHOUT_STATES = "MomentumDeltaNetTransformerForCausalLM"
"""a name for vLLM only: what it must know of a model with recurrent layers is wrong for one that is all attention"""


RECURRENT_BACKEND = "MDN_RECURRENT"
"""vLLM's name for the metadata of our recurrent layers (``batch``)"""


def register() -> None:
    """Makes the architecture known to vLLM; calling it again changes nothing."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    import mdn.models  # registers the configuration with transformers' AutoConfig
    from mdn.common.loading import import_plugins_of_environment
    from mdn.vllm.facts import ArchitectureFacts, ServingRules

    import_plugins_of_environment()  # a user's mixers
    model_type = mdn.models.MomentumDeltaNetConfig.model_type
    MODELS_CONFIG_MAP[ARCHITECTURE] = MODELS_CONFIG_MAP[WITHOUT_STATES] = ServingRules
    MODEL_ARCH_CONFIG_CONVERTORS[model_type] = ArchitectureFacts
    ModelRegistry.register_model(ARCHITECTURE, "mdn.vllm.served_model:ServedForCausalLM")
    ModelRegistry.register_model(WITHOUT_STATES, "mdn.vllm.served_model:ServedTransformer")
    # Here and not where it is used, because the workers send it to the process of the engine.
    if RECURRENT_BACKEND not in MambaAttentionBackendEnum.__members__:
        MambaAttentionBackendEnum.register(RECURRENT_BACKEND, "mdn.vllm.batch.RecurrentBackend")
    # Compiled graphs end before this op, as before vLLM's own attention, so that it sees the batch of every step.
    if "mdn::serve_mixer" not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append("mdn::serve_mixer")

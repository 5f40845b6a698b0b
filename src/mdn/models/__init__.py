"""The Hugging Face language model; importing this package registers it with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.modeling import MomentumDeltaNetForCausalLM, MomentumDeltaNetModel, MomentumDeltaNetPreTrainedModel

AutoConfig.register(MomentumDeltaNetConfig.model_type, MomentumDeltaNetConfig, exist_ok=True)
AutoModel.register(MomentumDeltaNetConfig, MomentumDeltaNetModel, exist_ok=True)
AutoModelForCausalLM.register(MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM, exist_ok=True)

__all__ = [
    "MomentumDeltaNetConfig",
    "MomentumDeltaNetForCausalLM",
    "MomentumDeltaNetModel",
    "MomentumDeltaNetPreTrainedModel",
]

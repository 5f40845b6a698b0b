"""The Hugging Face language model; importing this package registers it with transformers' Auto classes."""

import sys

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.modeling import MomentumDeltaNetForCausalLM, MomentumDeltaNetModel, MomentumDeltaNetPreTrainedModel

AutoConfig.register(MomentumDeltaNetConfig.model_type, MomentumDeltaNetConfig, exist_ok=True)
AutoModel.register(MomentumDeltaNetConfig, MomentumDeltaNetModel, exist_ok=True)
AutoModelForCausalLM.register(MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM, exist_ok=True)
# With label_smoothing_factor the Trainer computes the loss itself, and shifts the labels only for classes named here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MomentumDeltaNetConfig.model_type] = MomentumDeltaNetForCausalLM.__name__
# `transformers serve` looks a model's class up by its name in the module transformers, not in the Auto classes. It may
# hold another object of that module than we do, because transformers imports itself a second time.
_server = sys.modules.get("transformers.cli.serving.model_manager")
for _module in {transformers, getattr(_server, "transformers", transformers)}:
    vars(_module)[MomentumDeltaNetForCausalLM.__name__] = MomentumDeltaNetForCausalLM

__all__ = [
    "MomentumDeltaNetConfig",
    "MomentumDeltaNetForCausalLM",
    "MomentumDeltaNetModel",
    "MomentumDeltaNetPreTrainedModel",
]

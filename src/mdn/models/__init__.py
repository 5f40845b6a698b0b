"""The Hugging Face language model; importing this package registers it with transformers' Auto classes."""

import sys

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.modeling import MomentumDeltaNetForCausalLM, MomentumDeltaNetModel, MomentumDeltaNetPreTrainedModel

AutoConfig.register(MomentumDeltaNetConfig.model_type, MomentumDeltaNetConfig, exist_ok=True)
AutoModel.register(MomentumDeltaNetConfig, MomentumDeltaNetModel, exist_ok=True)
AutoModelForCausalLM.register(MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM, exist_ok=True)
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

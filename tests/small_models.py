"""Small models for the tests: every mixer, hybrids, and the comparisons that several files use."""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM

VOCABULARY = 61
# Fields that a mixer needs at this size, beyond the common ones.
FIELDS: dict[str, dict] = {name: {} for name in MIXERS}
FIELDS["attention"] = {"num_kv_heads": 2}
# Two kinds of layers in one model.
HYBRIDS: dict[str, dict] = {
    "hybrid": {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2}},
    "hybrid with a window": {"attn": {"layers": [1], "num_heads": 4, "window_size": 9}},
    "grouped value heads": {"num_heads": 2, "num_v_heads": 4},
    "no convolution": {"use_short_conv": False},
    "quasi-hyperbolic momentum": {"momentum": "quasi_hyperbolic", "mu_init": 10},
    "Nesterov's momentum": {"momentum": "nesterov", "mu_init": [0.001, 1.5]},
}
MODELS = sorted(MIXERS) + sorted(HYBRIDS)
# The authors' 400M file as they publish it, with every key it has.
AUTHORS_400M = {
    "attn_mode": "chunk", "bos_token_id": 1, "conv_size": 4, "eos_token_id": 2, "expand_v": 2,
    "fuse_cross_entropy": True, "head_dim": 128,
    "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": None, "model_type": "momentum_deltanet", "norm_eps": 1e-06, "num_heads": 6,
    "num_hidden_layers": 21, "tie_word_embeddings": False, "use_cache": True, "use_gate": True,
    "use_output_correction": True, "use_p_times_alpha": True, "use_short_conv": True, "min_log_mu": -2.0,
    "vocab_size": 50257,
}  # fmt: skip


def small_config(name: str = "momentum_deltanet", **fields) -> MomentumDeltaNetConfig:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "expand_v": 2,
        "intermediate_size": 48,
        "initializer_range": 0.1,
        "mixer": name if name in MIXERS else "momentum_deltanet",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return MomentumDeltaNetConfig(**{**common, **(FIELDS.get(name) or HYBRIDS.get(name) or {}), **fields})


def small_model(name: str = "momentum_deltanet", seed: int = 0, **fields) -> MomentumDeltaNetForCausalLM:
    torch.manual_seed(seed)
    return MomentumDeltaNetForCausalLM(small_config(name, **fields)).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))

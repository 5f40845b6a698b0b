"""The first-order rules of the paper's Table 1: `chunk_*`, the definition `recurrent_*`, and one token, `*_step`."""

from .comba import chunk_comba, comba_step, recurrent_comba
from .delta_rule import chunk_delta_rule, delta_rule_step, recurrent_delta_rule
from .gated_delta_rule import chunk_gated_delta_rule, gated_delta_rule_step, recurrent_gated_delta_rule
from .gla import chunk_gla, gla_step, recurrent_gla
from .kda import chunk_kda, kda_step, recurrent_kda
from .linear_attn import chunk_linear_attn, linear_attn_step, recurrent_linear_attn
from .rwkv7 import chunk_rwkv7, recurrent_rwkv7, rwkv7_step
from .simple_gla import chunk_simple_gla, recurrent_simple_gla, simple_gla_step

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "comba_step",
    "delta_rule_step",
    "gated_delta_rule_step",
    "gla_step",
    "kda_step",
    "linear_attn_step",
    "recurrent_comba",
    "recurrent_delta_rule",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_linear_attn",
    "recurrent_rwkv7",
    "recurrent_simple_gla",
    "rwkv7_step",
    "simple_gla_step",
]

"""What other projects call things: one entry per kind of checkpoint that `mdn convert` understands.

A family says which of our mixers it is, how its config fields are called, which settings it must have, and how its
parameters are renamed. FLA's recurrent models need almost nothing: our parameters have FLA's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]
REQUIRED = object()

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
NEVER_STORED = r"(^|\.)(rotary|rotary_emb)\.inv_freq$"


@dataclass(frozen=True)
class Family:
    """`fields` and `options` map our name to (their name, their default)."""

    mixer: str
    fields: Mapping[str, tuple[str, Any]]
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """values of their fields with which the model is one that we can express; a missing field is fine"""
    renames: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement) on parameter names, in this order"""
    finish: Callable[[Fields, Fields], None] = lambda ours, theirs: None
    """last changes to our fields, from theirs; may raise a ValueError"""


def same(*names: str, **defaults: Any) -> dict[str, tuple[str, Any]]:
    """Fields with the same name in both: without a default they must be there."""
    return {name: (name, REQUIRED) for name in names} | {name: (name, default) for name, default in defaults.items()}


BACKBONE = same(
    *SIZES,
    **dict.fromkeys(TOKENS),
    tie_word_embeddings=False,
    initializer_range=0.02,
    max_position_embeddings=2048,
)
FLA_BACKBONE = BACKBONE | same(hidden_ratio=4, intermediate_size=None, norm_eps=1e-6)
FLA_PLAIN = {"attnres_block_size": (None,), "hidden_act": ("swish", "silu")}
GATED_HEADS = same(head_dim=256, num_heads=6, num_v_heads=None, expand_v=2.0, use_short_conv=True, conv_size=4)


def hybrid(ours: Fields, theirs: Fields) -> None:
    """FLA's attention layers, without the settings that are switched off."""
    if theirs.get("attn"):
        ours["attn"] = {key: value for key, value in theirs["attn"].items() if value not in (None, False)}


def rotary_settings(ours: Fields, theirs: Fields) -> None:
    """transformers keeps RoPE's base in the config or in a dict, and may scale the positions (we do not)."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type must be 'default', got {kind!r}")
    ours["rope_theta"] = float(rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0)
    head_dim = theirs.get("head_dim") or ours["hidden_size"] // ours["num_heads"]
    if head_dim * ours["num_heads"] != ours["hidden_size"]:
        raise ValueError(f"head_dim must be hidden_size / num_attention_heads, got {head_dim}")
    if theirs["model_type"] == "qwen2":
        ours["qkv_bias"] = True
        if not theirs.get("use_sliding_window"):
            ours["window_size"] = None


def mamba2_settings(ours: Fields, theirs: Fields) -> None:
    """FLA's config and transformers' share a model type; transformers normalises all groups of channels together."""
    options = ours["mixer_options"]
    ours["use_mlp"] = False
    if "layer_norm_epsilon" in theirs:
        ours["norm_eps"], options["norm_groups"] = theirs["layer_norm_epsilon"], 1
    limits = theirs.get("dt_limit") or theirs.get("time_step_limit") or (0.0, math.inf)
    low, high = (_number(limit) for limit in limits)
    if (low, high) != (0.0, math.inf):
        options["dt_limit"] = [low, high]


def rwkv7_settings(ours: Fields, theirs: Fields) -> None:
    if theirs.get("attn"):
        raise ValueError("attn must be null: hybrids of RWKV-7 and attention cannot be converted")
    width = theirs.get("value_dim")
    if width is not None and set(width if isinstance(width, list) else [width]) != {ours["hidden_size"]}:
        raise ValueError(f"value_dim must be hidden_size={ours['hidden_size']}, got {width}")
    if ours["intermediate_size"] is None:
        ours["intermediate_size"] = 32 * math.ceil(ours["hidden_size"] * (theirs.get("hidden_ratio") or 4) / 32)
    if theirs.get("head_dim") is None:
        ours["head_dim"] = ours["hidden_size"] // theirs["num_heads"]
    ours |= {"mlp": "rwkv7", "norm": "layernorm", "norm_embeddings": theirs.get("norm_first", True)}


def _number(value: Any) -> float:
    """JSON has no infinity; transformers writes {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


LLAMA = Family(
    mixer="attention",
    fields=same(*SIZES, "intermediate_size", **dict.fromkeys(TOKENS), tie_word_embeddings=False)
    | same(initializer_range=0.02, max_position_embeddings=2048)
    | {
        "num_heads": ("num_attention_heads", REQUIRED),
        "num_kv_heads": ("num_key_value_heads", None),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "window_size": ("sliding_window", None),
    },
    must_be={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    renames=(
        (r"^model\.embed_tokens\.", "model.embeddings."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".mlp_norm."),
        (r"\.self_attn\.", ".attn."),
    ),
    finish=rotary_settings,
)

FAMILIES: dict[str, Family] = {
    "momentum_deltanet": Family("momentum_deltanet", {}),
    "gated_deltanet": Family(
        mixer="gated_deltanet",
        fields=FLA_BACKBONE | GATED_HEADS | same(use_gate=True, allow_neg_eigval=False),
        options=same(output_gate_activation="swish"),
        must_be=FLA_PLAIN,
        finish=hybrid,
    ),
    "comba": Family(
        mixer="comba",
        fields=FLA_BACKBONE | GATED_HEADS | same(use_output_correction=True) | {"use_gate": ("use_output_gate", True)},
        options=same(use_inner_decay=True, correction_factor=1.0),
        must_be=FLA_PLAIN,
        finish=hybrid,
    ),
    "kda": Family(
        mixer="kda",
        fields=FLA_BACKBONE | GATED_HEADS | same(head_dim=128, num_heads=16, expand_v=1.0, allow_neg_eigval=False),
        options=same(lower_bound=None),
        must_be=FLA_PLAIN,
        finish=hybrid,
    ),
    "delta_net": Family(
        mixer="deltanet",
        fields=FLA_BACKBONE | same(num_heads=16, allow_neg_eigval=False),
        options=same(expand_k=1.0, expand_v=1.0, use_gate=False, use_short_conv=True, conv_size=4, use_beta=True),
        must_be=FLA_PLAIN | {"qk_norm": ("l2",), "qk_activation": ("silu",), "use_output_norm": (True,)},
        finish=hybrid,
    ),
    "gla": Family(
        mixer="gla",
        fields=FLA_BACKBONE | same(num_heads=4),
        options=same(expand_k=0.5, expand_v=1.0, use_short_conv=False, conv_size=4, clamp_min=None),
        must_be=FLA_PLAIN
        | {"num_kv_heads": (None,), "feature_map": (None,), "use_output_gate": (True,), "use_gv": (False,)},
        renames=((r"\.g_norm\.weight$", ".g_norm_swish_gate.weight"),),
        finish=hybrid,
    ),
    "linear_attn": Family(
        mixer="linear_attention",
        fields=FLA_BACKBONE | same(num_heads=4),
        options=same(expand_k=1.0, expand_v=1.0, feature_map="elementwise_product")
        | {"do_feature_map_norm": ("norm_feature_map", False)},
        must_be=FLA_PLAIN
        | {"num_kv_heads": (None,), "tie_feature_map_qk": (False,), "norm_q": (False,), "norm_k": (False,)},
        finish=hybrid,
    ),
    "mamba2": Family(
        mixer="mamba2",
        fields={name: names for name, names in BACKBONE.items() if name != "max_position_embeddings"}
        | same(head_dim=64, norm_eps=1e-5),
        options=same(state_size=128, expand=2, n_groups=1, conv_kernel=4, use_conv_bias=True, use_bias=False),
        must_be={"hidden_act": ("silu", "swish"), "D_has_hdim": (False,), "rmsnorm": (True,)}
        | {"norm_before_gate": (False,)},
        renames=(
            (r"^backbone\.embeddings?\.", "model.embeddings."),
            (r"^backbone\.norm_f\.", "model.norm."),
            (r"^backbone\.", "model."),
            (r"^(model\.layers\.\d+)\.norm\.", r"\1.attn_norm."),
            (r"\.mixer\.", ".attn."),
        ),
        finish=mamba2_settings,
    ),
    "rwkv7": Family(
        mixer="rwkv7",
        fields=FLA_BACKBONE | same(head_dim=64, norm_eps=1e-5),
        options=same(decay_low_rank_dim=64, gate_low_rank_dim=128, a_low_rank_dim=64, v_low_rank_dim=16),
        must_be={"hidden_act": ("sqrelu",), "norm_bias": (True,)},
        renames=((r"\.ffn_norm\.", ".mlp_norm."), (r"\.ffn\.", ".mlp.")),
        finish=rwkv7_settings,
    ),
    "transformer": Family(
        mixer="attention",
        fields=FLA_BACKBONE
        | same(num_heads=32, num_kv_heads=None, qkv_bias=False, window_size=None, rope_theta=10000.0),
        must_be=FLA_PLAIN | {"qk_norm": (False,)},
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
}

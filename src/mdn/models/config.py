"""The configuration of the language model: the field names of the authors' and FLA's JSON files, plus a few of ours.

Those files load unchanged. Fields that only choose a fused kernel elsewhere (``fuse_norm``, ``fuse_swiglu``,
``fuse_cross_entropy``) are accepted and change nothing here.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mdn import __version__
from mdn.layers import MIXERS
from mdn.layers.attention import ATTENTION_KEYS
from mdn.layers.init import checked_initial_range
from mdn.layers.momentum_deltanet import KINDS_OF_MOMENTUM
from mdn.ops.cpu.linear import FORMATS

DEFAULT_LOSS_CHUNK = 1024
# Sizes beyond these are mistakes: nothing that exists could hold the model.
LARGEST_SIZE, MOST_LAYERS, WIDEST_CONVOLUTION = 2**31 - 1, 10_000, 1024
INTEGERS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "head_dim", "num_heads", "momentum_block_size"), LARGEST_SIZE),
    "num_hidden_layers": MOST_LAYERS,
    "conv_size": WIDEST_CONVOLUTION,
    "max_position_embeddings": LARGEST_SIZE,
}
"""fields that are integers from 1 to this number"""
INTEGERS_OR_NONE = dict.fromkeys(
    ("intermediate_size", "num_v_heads", "num_kv_heads", "lora_gate_rank", "loss_chunk_size", "window_size"),
    LARGEST_SIZE,
)
POSITIVE_NUMBERS = ("norm_eps", "expand_v", "tau_factor")
POSITIVE_NUMBERS_OR_NONE = ("hidden_ratio", "rope_theta")
MIXER_FIELDS = (
    *("attn_mode", "backend", "num_v_heads", "use_gate", "use_lora_gate", "lora_gate_rank", "gate_activation"),
    *("use_short_conv", "conv_size", "conv_bias", "use_output_correction", "use_momentum", "min_log_mu", "tau_factor"),
    *("bound_alpha", "bound_beta", "eta_activation", "use_p_times_alpha", "allow_neg_eigval", "momentum", "mu_init"),
    *("log_factor_init", "momentum_block_size", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"),
)
"""fields that only mixers read. Without ``head_dim``, ``num_heads`` and ``expand_v``: models that are compared share
them, also where a mixer's heads follow from its width."""

# A directory with this file and an ``auto_map`` loads with ``trust_remote_code=True`` where mdn.models was not
# imported (pipelines, ``transformers serve``), and says what to install where the package is missing.
AUTO_MODULE = "modeling_momentum_deltanet"
AUTO_MAP = {
    "AutoConfig": f"{AUTO_MODULE}.MomentumDeltaNetConfig",
    "AutoModel": f"{AUTO_MODULE}.MomentumDeltaNetModel",
    "AutoModelForCausalLM": f"{AUTO_MODULE}.MomentumDeltaNetForCausalLM",
}
AUTO_CODE = '''"""Finds the classes of this model in the package momentum-deltanet, which must be installed."""

try:
    from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM, MomentumDeltaNetModel
except ImportError as error:
    raise ImportError(
        "this model needs the package momentum-deltanet; install it with: pip install momentum-deltanet"
    ) from error

__all__ = ["MomentumDeltaNetConfig", "MomentumDeltaNetForCausalLM", "MomentumDeltaNetModel"]
'''


class MomentumDeltaNetConfig(PreTrainedConfig):
    """Model shape, the mixer and its ablations. Defaults are the paper's 400M model."""

    model_type = "momentum_deltanet"
    # transformers reads the next two as plain class attributes
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012  (names that other tools look for)
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "norm_eps",
    }

    # ---- the backbone
    vocab_size: int = 50257
    hidden_size: int = 1024
    num_hidden_layers: int = 21
    hidden_ratio: int | float | None = 4
    """MLP width is 2/3 * hidden_ratio * hidden_size, rounded up to a multiple of 256"""
    intermediate_size: int | None = None
    """MLP width, if it should be exactly this"""
    hidden_act: str = "swish"
    mlp: str = "swiglu"
    """"swiglu", or "rwkv7": RWKV-7's channel mixing, in blocks with a recurrent mixer"""
    norm: str = "rmsnorm"
    """the norms between blocks: "rmsnorm", or "layernorm" (RWKV-7)"""
    norm_embeddings: bool = False
    """one more norm after the embedding, in the first block (RWKV-7)"""
    use_mlp: bool = True
    """False: blocks without an MLP (Mamba2 and the MQAR models)"""
    norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    """the training context; nothing in the model depends on it"""
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    weight_format: str | None = None
    """of linear layers and the embedding: None, or packed as "bf16", "int8" or "int4" (``model.quantize``)"""
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    # ---- the mixer
    mixer: str = "momentum_deltanet"
    """a name in mdn.layers.MIXERS"""
    mixer_options: dict | None = None
    """further arguments of the mixer's constructor by name, for what no field here sets (Mamba2's state_size)"""
    attn: dict | None = None
    """a hybrid's attention layers: layers, num_heads, and optionally num_kv_heads, qkv_bias, window_size, rope_theta"""
    attn_mode: str = "chunk"
    """form of the rule for more than one token: "chunk" or "fused_recurrent\""""
    backend: str = "auto"
    """implementation of the rule, see mdn.ops"""
    head_dim: int = 128
    """width of a key; not of "attention", "deltanet", "gla" and "linear_attention", where ``num_heads`` divides the
    model's width"""
    num_heads: int = 6
    """not of "mamba2" and "rwkv7", whose number of heads follows from the width: ``expand * hidden_size / head_dim``
    and ``hidden_size / head_dim``"""
    num_v_heads: int | None = None
    expand_v: int | float = 2
    """width of a value, in ``head_dim``; "deltanet", "gla" and "linear_attention" have their own in ``mixer_options``,
    "attention", "mamba2" and "rwkv7" none"""
    use_gate: bool = True
    use_lora_gate: bool = False
    lora_gate_rank: int | None = None
    gate_activation: str | None = None
    """activation of the output gate, "sigmoid" or "swish"; None: the mixer's own. Two mixers have a choice:
    "momentum_deltanet" (its own is "sigmoid"; FLA's layer uses "swish") and "gated_deltanet" (its own is "swish")"""
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False

    # ---- the momentum rule and its ablations
    use_output_correction: bool = True
    use_momentum: bool = True
    min_log_mu: float | int | None = -2.0
    tau_factor: int | float = 1
    bound_alpha: bool = True
    bound_beta: bool = True
    eta_activation: str = "tanh"
    use_p_times_alpha: bool = True
    allow_neg_eigval: bool = False
    momentum: str = "heavy_ball"
    """"heavy_ball" (the paper's), "quasi_hyperbolic" or "nesterov\""""
    mu_init: float | int | list | tuple = 1.0
    """initial decay of the momentum: a factor on the released code's rates, or [low, high] for -log mu, log-uniform"""
    log_factor_init: float | int | list | tuple = 4.0
    """initial s: U(0, this), or [low, high], log-uniform"""
    momentum_block_size: int = 1
    """B > 1 trains blockwise momentum (the causality analysis); decoding is always token by token"""

    # ---- mixer "attention"
    num_kv_heads: int | None = None
    qkv_bias: bool = False
    window_size: int | None = None
    rope_theta: float | int | None = 10000.0

    # ---- the loss
    loss_chunk_size: int | None = None
    """tokens per piece of the linear cross entropy that never holds all logits; None: ordinary logits"""
    fuse_linear_cross_entropy: bool = False
    """FLA's name for the same; sets loss_chunk_size if it is None"""

    # ---- accepted, without effect
    fuse_norm: bool = True
    fuse_swiglu: bool = True
    fuse_cross_entropy: bool = True
    use_l2warp: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for alias, field in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, field, kwargs.pop(alias))
        self._check_types()
        self._check_choices()
        if self.fuse_linear_cross_entropy and self.loss_chunk_size is None:
            self.loss_chunk_size = DEFAULT_LOSS_CHUNK
        self.attn = None if self.attn is None else self._checked_attn(self.attn)
        kwargs.pop("layer_types", None)  # follows from mixer and attn
        kwargs.pop("mdn_version", None)  # of the file that this comes from
        self._warn_of_misspelt(kwargs)
        self._warn_of_unread()
        super().__post_init__(**kwargs)

    # ---------------------------------------------------------------- checks

    def _warn_of_misspelt(self, others: dict[str, Any]) -> None:
        """Configs of transformers keep unknown fields; a name that is almost one of ours is probably a typing error."""
        known = [*MomentumDeltaNetConfig.__annotations__, *self.attribute_map]
        for name in others:
            close = [] if hasattr(self, name) else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                warnings.warn(f"config: {name} has no effect here; did you mean {close[0]}?", stacklevel=4)

    def _warn_of_unread(self) -> None:
        """Warns of fields that were set but that nothing reads: the config would not describe the model."""
        mixed = any(not self.is_hybrid_attention(i) for i in range(self.num_hidden_layers))
        fields = MIXERS[self.mixer].config_fields().items() if mixed else ()  # attn alone sets a hybrid's attention
        read = {field for name, field in fields if name not in (self.mixer_options or {})}
        for name in MIXER_FIELDS:
            value = getattr(self, name)
            if name not in read and value != getattr(MomentumDeltaNetConfig, name):
                unread = f"no layer of this model (mixer {self.mixer!r}) reads it"
                warnings.warn(f"config: {name}={value!r} has no effect: {unread}", stacklevel=4)

    def _check_types(self) -> None:
        for name, largest in (INTEGERS | INTEGERS_OR_NONE).items():
            if name in INTEGERS or getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), largest)
        for name in POSITIVE_NUMBERS + POSITIVE_NUMBERS_OR_NONE:
            if name in POSITIVE_NUMBERS or getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.mixer == "attention":
            _check_positive("rope_theta", self.rope_theta)
        for name in MomentumDeltaNetConfig.__annotations__:
            switch = isinstance(getattr(MomentumDeltaNetConfig, name), bool)
            if switch and not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not _is_number(self.initializer_range) or self.initializer_range < 0:
            raise ValueError(f"initializer_range must be a number >= 0, got {self.initializer_range!r}")
        if self.min_log_mu is not None and not (_is_number(self.min_log_mu) and self.min_log_mu <= 0):
            raise ValueError(f"min_log_mu must be None or a number <= 0, got {self.min_log_mu!r}")
        for name in ("mu_init", "log_factor_init"):
            checked_initial_range(name, getattr(self, name))
        pad = self.pad_token_id
        if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int) or abs(pad) >= self.vocab_size):
            raise ValueError(f"pad_token_id must be None or a token below vocab_size={self.vocab_size}, got {pad!r}")

    def _check_choices(self) -> None:
        if self.mixer not in MIXERS:
            raise ValueError(f"mixer must be one of {sorted(MIXERS)}, got {self.mixer!r}")
        if self.mixer_options is not None and not isinstance(self.mixer_options, dict):
            raise ValueError(f"mixer_options must be a mapping of names to values, got {self.mixer_options!r}")
        MIXERS[self.mixer].checked_options(self.mixer_options)
        if self.momentum not in KINDS_OF_MOMENTUM:
            raise ValueError(f"momentum must be one of {', '.join(KINDS_OF_MOMENTUM)}, got {self.momentum!r}")
        if self.hidden_act not in ("swish", "silu"):
            raise ValueError(f"hidden_act must be 'swish' (or 'silu', the same), got {self.hidden_act!r}")
        if self.mlp not in ("swiglu", "rwkv7"):
            raise ValueError(f"mlp must be 'swiglu' or 'rwkv7', got {self.mlp!r}")
        if self.norm not in ("rmsnorm", "layernorm"):
            raise ValueError(f"norm must be 'rmsnorm' or 'layernorm', got {self.norm!r}")
        if self.weight_format is not None:
            check_weight_format(self.weight_format)
        if self.use_l2warp:
            raise ValueError("use_l2warp=True is not supported; set it to false")

    def _checked_attn(self, attn: Any) -> dict[str, Any]:
        """``attn`` with all its keys."""
        if not isinstance(attn, dict) or "layers" not in attn or "num_heads" not in attn:
            raise ValueError(f"attn must be a mapping with the keys 'layers' and 'num_heads', got {attn!r}")
        unknown = sorted(set(attn) - set(ATTENTION_KEYS))
        if unknown:
            raise ValueError(f"attn has unknown keys {unknown}; expected some of {list(ATTENTION_KEYS)}")
        layers, last = attn["layers"], self.num_hidden_layers - 1
        if not isinstance(layers, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in layers):
            raise ValueError(f"attn['layers'] must be a list of layer numbers, got {layers!r}")
        outside = [layer for layer in layers if not 0 <= layer <= last]
        if outside:
            raise ValueError(f"attn['layers'] must lie in 0..{last}, got {outside}")
        defaults = {"num_kv_heads": attn["num_heads"], "qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
        full = {**defaults, **{key: value for key, value in attn.items() if value is not None or key == "window_size"}}
        for key in ("num_heads", "num_kv_heads", "window_size"):
            if full[key] is not None:
                _check_integer(f"attn['{key}']", full[key], LARGEST_SIZE)
        if self.hidden_size % (2 * full["num_heads"]) or full["num_heads"] % full["num_kv_heads"]:
            raise ValueError(
                f"attn['num_heads'] must divide hidden_size={self.hidden_size} into heads of an even dimension, and be "
                f"a multiple of attn['num_kv_heads']; got {full['num_heads']} and {full['num_kv_heads']}"
            )
        _check_positive("attn['rope_theta']", full["rope_theta"])
        if not isinstance(full["qkv_bias"], bool):
            raise ValueError(f"attn['qkv_bias'] must be true or false, got {full['qkv_bias']!r}")
        if self.mixer == "attention" and full["window_size"] != self.window_size:
            raise ValueError(
                f"attn['window_size'] must equal window_size={self.window_size} when mixer is 'attention', "
                f"got {full['window_size']}"
            )
        return full

    # ---------------------------------------------------------------- what follows from the fields

    def mixer_name(self, layer_idx: int) -> str:
        """The mixer of one layer: attention where ``attn`` says so, ``mixer`` elsewhere."""
        return "attention" if self.is_hybrid_attention(layer_idx) else self.mixer

    def is_hybrid_attention(self, layer_idx: int) -> bool:
        """Whether this is an attention layer because ``attn`` lists it."""
        return self.attn is not None and layer_idx in self.attn["layers"]

    @property
    def mlp_size(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        return 256 * -(-int(self.hidden_size * ratio * 2 / 3) // 256)

    @property
    def sliding_window(self) -> int | None:
        """The window of the attention layers, where transformers' cache looks for it."""
        return self.window_size if self.attn is None else self.attn["window_size"]

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer of every block, in transformers' words."""
        types = []
        for layer_idx in range(self.num_hidden_layers):
            kind = MIXERS[self.mixer_name(layer_idx)].cache_type
            if kind == "full_attention" and self.sliding_window is not None:
                kind = "sliding_attention"
            types.append(kind)
        return types

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How transformers splits the model over ranks (``tp_plan="auto"``); empty if a mixer's heads cannot be."""
        plans = [MIXERS[name].tensor_plan for name in {self.mixer_name(i) for i in range(self.num_hidden_layers)}]
        if not all(plans) or (self.use_mlp and self.mlp != "swiglu"):
            return {}
        mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"} if self.use_mlp else {}
        blocks = {f"attn.{name}".rstrip("."): style for plan in plans for name, style in plan.items()}
        blocks |= {f"mlp.{name}": style for name, style in mlp.items()}
        return {f"layers.*.{name}": style for name, style in blocks.items()}

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        """Ignored: transformers 5.19 adds an entry for tied embeddings, under a name that ours do not have."""

    def validate(self) -> None:
        """transformers' own checks refuse layer types that it does not know; ours are derived, and the recurrent one is
        registered with its cache (mdn.models.cache). The fields were checked in ``__post_init__``."""

    # ---------------------------------------------------------------- saving and loading

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "mdn_version": __version__}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(of_this_version(config_dict), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Any:
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Also writes what lets transformers find the classes in a process that has not imported mdn.models."""
        os.makedirs(save_directory, exist_ok=True)
        (Path(save_directory) / f"{AUTO_MODULE}.py").write_text(AUTO_CODE)
        self.auto_map = dict(AUTO_MAP)
        try:
            super().save_pretrained(save_directory, push_to_hub, **kwargs)
        finally:
            del self.auto_map

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: transformers calls this after loading through the saved ``auto_map``, so that saving would
        copy the source file of this class; ``save_pretrained`` writes a file that imports the package instead."""


def of_this_version(saved: dict[str, Any]) -> dict[str, Any]:
    """The fields of a saved config as they are read today.

    Before ``mdn_version`` was saved, ``gate_activation`` was "sigmoid" in the file of every mixer, also where the gate
    was another and nothing read the field.
    """
    if "transformers_version" not in saved or "mdn_version" in saved:  # not one of ours, or not an old one
        return dict(saved)
    mixer = MIXERS.get(saved.get("mixer", MomentumDeltaNetConfig.mixer))
    unread = mixer is not None and "gate_activation" not in mixer.argument_names()
    return {name: value for name, value in saved.items() if not (name == "gate_activation" and unread)}


def check_weight_format(weight_format: str) -> None:
    if weight_format not in FORMATS:
        raise ValueError(f"weight_format must be one of {', '.join(FORMATS)}, got {weight_format!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_integer(name: str, value: Any, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise ValueError(f"{name} must be a positive integer up to {largest}, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")

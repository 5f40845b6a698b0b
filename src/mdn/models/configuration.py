"""The configuration of the language model: the field names of the authors' and FLA's JSON files, plus a few of ours.

Those files load unchanged. Fields that only choose a fused kernel elsewhere (``fuse_norm``, ``fuse_swiglu``,
``fuse_cross_entropy``) are accepted and change nothing here.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from mdn.layers import MIXERS
from mdn.layers.attention import ATTENTION_KEYS

DEFAULT_LOSS_CHUNK = 1024
POSITIVE_INTEGERS = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "num_heads", "momentum_block_size")
POSITIVE_INTEGERS_OR_NONE = ("intermediate_size", "num_v_heads", "num_kv_heads", "lora_gate_rank", "loss_chunk_size")


class MomentumDeltaNetConfig(PreTrainedConfig):
    """Model shape, the mixer and its ablations. Defaults are the paper's 400M model."""

    model_type = "momentum_deltanet"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers reads it as a plain class attribute)

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
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    # ---- the mixer
    mixer: str = "momentum_deltanet"
    """a name in mdn.layers.MIXERS"""
    mixer_options: dict | None = None
    """further arguments of the mixer's constructor by name, for what no field here says (Mamba2's state_size)"""
    attn: dict | None = None
    """a hybrid's attention layers: layers, num_heads, and optionally num_kv_heads, qkv_bias, window_size, rope_theta"""
    attn_mode: str = "chunk"
    """form of the rule for more than one token: "chunk" or "fused_recurrent\""""
    backend: str = "auto"
    """implementation of the rule, see mdn.ops"""
    head_dim: int = 128
    num_heads: int = 6
    num_v_heads: int | None = None
    expand_v: int | float = 2
    use_gate: bool = True
    use_lora_gate: bool = False
    lora_gate_rank: int | None = None
    gate_activation: str = "sigmoid"
    """activation of the output gate; FLA's layer uses "swish\""""
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
    """FLA's name for the same wish; sets loss_chunk_size if it is None"""

    # ---- accepted, without effect
    fuse_norm: bool = True
    fuse_swiglu: bool = True
    fuse_cross_entropy: bool = True
    use_l2warp: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_integers()
        if self.mixer not in MIXERS:
            raise ValueError(f"mixer must be one of {sorted(MIXERS)}, got {self.mixer!r}")
        if self.hidden_act not in ("swish", "silu"):
            raise ValueError(f"hidden_act must be 'swish' (or 'silu', the same), got {self.hidden_act!r}")
        if self.mlp not in ("swiglu", "rwkv7"):
            raise ValueError(f"mlp must be 'swiglu' or 'rwkv7', got {self.mlp!r}")
        if self.norm not in ("rmsnorm", "layernorm"):
            raise ValueError(f"norm must be 'rmsnorm' or 'layernorm', got {self.norm!r}")
        if self.use_l2warp:
            raise ValueError("use_l2warp=True is not supported; set it to false")
        if self.fuse_linear_cross_entropy and self.loss_chunk_size is None:
            self.loss_chunk_size = DEFAULT_LOSS_CHUNK
        self.attn = None if self.attn is None else self._checked_attn(self.attn)
        kwargs.pop("layer_types", None)  # follows from mixer and attn
        super().__post_init__(**kwargs)

    def _check_integers(self) -> None:
        for name in POSITIVE_INTEGERS + POSITIVE_INTEGERS_OR_NONE:
            value = getattr(self, name)
            if value is None and name in POSITIVE_INTEGERS_OR_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")

    def _checked_attn(self, attn: dict) -> dict:
        if "layers" not in attn or "num_heads" not in attn:
            raise ValueError(f"attn must have the keys 'layers' and 'num_heads', got {sorted(attn)}")
        unknown = sorted(set(attn) - set(ATTENTION_KEYS))
        if unknown:
            raise ValueError(f"attn has unknown keys {unknown}; expected some of {list(ATTENTION_KEYS)}")
        outside = [layer for layer in attn["layers"] if not 0 <= layer < self.num_hidden_layers]
        if outside:
            raise ValueError(f"attn['layers'] must lie in 0..{self.num_hidden_layers - 1}, got {outside}")
        defaults = {"num_kv_heads": attn["num_heads"], "qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
        return {**defaults, **{key: value for key, value in attn.items() if value is not None or key == "window_size"}}

    # ---------------------------------------------------------------- what follows from the fields

    def mixer_name(self, layer_idx: int) -> str:
        """The mixer of one layer: attention where ``attn`` says so, ``mixer`` elsewhere."""
        return "attention" if self.attn is not None and layer_idx in self.attn["layers"] else self.mixer

    def attention_options(self, layer_idx: int) -> dict[str, Any]:
        """num_heads, num_kv_heads, qkv_bias, window_size and rope_theta of an attention layer."""
        keys = [key for key in ATTENTION_KEYS if key != "layers"]
        if self.attn is not None and layer_idx in self.attn["layers"]:
            return {key: self.attn[key] for key in keys}
        return {key: getattr(self, key) for key in keys}

    @property
    def mlp_size(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        return 256 * -(-int(self.hidden_size * ratio * 2 / 3) // 256)

    @property
    def sliding_window(self) -> int | None:
        """The window of the attention layers, where transformers' cache looks for it."""
        window = self.window_size if self.attn is None else self.attn["window_size"]
        return window

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

    def validate(self) -> None:
        """transformers' own checks refuse layer types that it does not know; ours are derived and "recurrent_state" is
        registered with its cache (mdn.models.cache). The fields were checked in ``__post_init__``."""

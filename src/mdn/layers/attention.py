"""Softmax attention with RoPE: the attention layers of hybrids and the Transformer baseline.

Shapes: queries ``[B, T, H, d]``, keys and values ``[B, T, HKV, d]`` (H a multiple of HKV), cached ones
``[B, HKV, columns, d]``. Packs are attended sequence by sequence, so no mask of quadratic size is built and nothing can
leak. With a cache, columns are those of the padded batch and the attention mask decides which of them are tokens. A
window of w lets a token see itself and the w - 1 tokens before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.layers.cache_access import LayerState
from mdn.layers.linear import Linear
from mdn.layers.mixer import Mixer, StateShape, Streams, check_heads_divide, columns
from mdn.layers.token_layout import TokenLayout

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

ATTENTION_KEYS = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")

QUERIES_AT_ONCE = 1024
"""bounds the mask ``[queries, keys]`` of context parallelism"""


class Attention(Mixer):
    cache_type: ClassVar[str] = "full_attention"
    tensor_plan: ClassVar[dict[str, str]] = {
        "": "mdn_heads",
        **columns("q_proj", "k_proj", "v_proj"),
        "o_proj": "rowwise",
    }
    reads_same_input: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        hidden_size: int = 1024,
        num_heads: int = 16,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
        layer_idx: int | None = None,
    ):
        super().__init__(hidden_size, layer_idx)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size must be a multiple of num_heads, got {hidden_size} and {num_heads}")
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {self.num_kv_heads}")
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be None or at least 1, got {window_size}")
        if rope_theta is None or not rope_theta > 0:
            raise ValueError(f"rope_theta must be a positive number, got {rope_theta}")
        self.head_dim = hidden_size // num_heads
        if self.head_dim % 2 != 0:
            raise ValueError(f"RoPE needs an even head dimension, got hidden_size / num_heads = {self.head_dim}")
        self.window_size = window_size
        self.rope_theta = float(rope_theta)
        self.q_proj = Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = Linear(hidden_size, hidden_size, bias=False)

    @classmethod
    def arguments_from(cls, config: Any, layer_idx: int) -> dict[str, Any]:
        """From ``config.attn`` for a hybrid's attention layer, else (mixer "attention") from the config itself."""
        if config.is_hybrid_attention(layer_idx):
            options = {key: value for key, value in config.attn.items() if key != "layers"}
            return {"hidden_size": config.hidden_size, "layer_idx": layer_idx, **options}
        return super().arguments_from(config, layer_idx)

    def heads(self, hidden_states: Tensor, layout: TokenLayout) -> Streams:
        """Queries ``[B, T, H, d]``, keys and values ``[B, T, HKV, d]``, rotated to their positions."""
        projected = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        cos, sin = layout.rotary(self.head_dim, self.rope_theta, hidden_states.device)
        return Streams(rotate(q, cos, sin), rotate(k, cos, sin), v)

    def keep_part(self, ranks: int) -> None:
        check_heads_divide("num_kv_heads", self.num_kv_heads, ranks)
        self.num_heads, self.num_kv_heads = self.num_heads // ranks, self.num_kv_heads // ranks

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        q, k, v = self.heads(hidden_states, layout)
        if layout.context_parallel is not None:
            o = self._attend_over_ranges(q, k, v, layout.context_parallel)
        elif state is not None:
            o = self._attend_cached(q, k, v, layout, state)
        elif layout.boundaries is not None:
            o = self._attend_packed(q, k, v, layout)
        else:
            o = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        y: Tensor = self.o_proj(o.flatten(-2))
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[B, H, T, d]``; without a mask: causal, in the window if there is one."""
        time = q.shape[2]
        if mask is None and self.window_size is not None and self.window_size < time:
            mask = causal_mask(time, time, self.window_size, q.device)
        causal = mask is None and time > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.num_kv_heads != self.num_heads
        )

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        assert layout.boundaries is not None
        lengths = [length for length in layout.boundaries.lengths if length > 0]
        sequences = zip(*(x.transpose(1, 2).split(lengths, dim=2) for x in (q, k, v)))
        parts = [self._attend(*sequence) for sequence in sequences]
        return torch.cat(parts, dim=2).transpose(1, 2) if parts else q

    def _attend_over_ranges(self, q: Tensor, k: Tensor, v: Tensor, plan: ContextParallelPlan) -> Tensor:
        """Every rank gathers all keys and values; its queries see those of their own document up to themselves."""
        queries, keys, values = (x.transpose(1, 2) for x in (q, plan.gather(k), plan.gather(v)))
        parts = []
        for piece in plan.pieces:
            begin = plan.documents.offsets[piece.document]
            for start in range(piece.start, piece.end, QUERIES_AT_ONCE):
                end = min(start + QUERIES_AT_ONCE, piece.end)
                seen = slice(begin, int(plan.tokens[end - 1]) + 1)
                mask = causal_mask(end - start, seen.stop - begin, self.window_size, q.device)
                parts.append(self._attend(queries[:, :, start:end], keys[:, :, seen], values[:, :, seen], mask))
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, state: LayerState) -> Tensor:
        """Appends the new columns to the cache and attends to all columns that are tokens."""
        time = layout.shape[1]
        keys, values = (layout.leave(x).transpose(1, 2) for x in (k, v))
        keys, values = state.append_keys_and_values(keys, values, self.window_size)
        if layout.past_length == 0 and layout.key_mask is None:
            return self._attend(q.transpose(1, 2), keys, values).transpose(1, 2)
        if layout.past_length == 0 and layout.boundaries is not None:
            return self._attend_packed(q, k, v, layout)
        queries = layout.leave(q).transpose(1, 2)
        columns = keys.shape[2]
        sees_all = self.window_size is None or columns <= self.window_size  # a plain DynamicCache() forgets nothing
        if time == 1 and layout.key_mask is None and sees_all:
            return self._attend(queries, keys, values).transpose(1, 2)
        mask = causal_mask(time, columns, self.window_size, q.device)
        if layout.key_mask is not None:
            mask = mask & layout.key_mask[:, None, None, -columns:].to(q.device)
            # A masked query may see itself, so that its row (dropped afterwards) is a number and not 0 / 0.
            mask = mask | causal_mask(time, columns, 1, q.device)
        o = self._attend(queries, keys, values, mask).transpose(1, 2)
        return layout.enter(o)

    def state_shapes(self) -> dict[str, StateShape]:
        """Per token in the context (at most ``window_size - 1`` of them with a window)."""
        return {"keys and values per token": StateShape((2 * self.num_kv_heads, self.head_dim), None)}

    def flops_per_token(self, context: int) -> int:
        seen = context if self.window_size is None else min(context, self.window_size)
        return 4 * seen * self.num_heads * self.head_dim


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on ``[B, T, H, d]``: the first and the second half of d are the two coordinates of the rotations."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1) if x.dtype != torch.float64 else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool ``[queries, keys]``: the last query is the last key; True where the key is seen."""
    distance = torch.arange(keys - queries, keys, device=device).unsqueeze(-1) - torch.arange(keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)

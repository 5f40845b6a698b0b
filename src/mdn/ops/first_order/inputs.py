"""What every first-order rule checks and prepares before it computes.

Shapes: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, scalar gates `[B, T, HV]`, vector gates `[B, T, HV, K]`, states
`[N, HV, K, V]`. Everything is computed in float32 (float64 for float64 inputs) with `HV` heads: value head `j` reads
query/key head `j // (HV // H)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.l2norm import l2norm


@dataclass(frozen=True)
class Inputs:
    """Checked tensors in the dtype of the computation, all with `HV` heads; `q` is already scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    initial_state: Tensor
    boundaries: SequenceBoundaries | None
    output_dtype: torch.dtype
    normalise: bool
    state_v_first: bool

    def key(self, name: str, x: Tensor) -> Tensor:
        """One more key-like tensor `[B, T, H or HV, K]` (Comba's p, RWKV-7's a and b), treated like k."""
        _check_shape(name, x, [*self.k.shape[:2], "H or HV", self.k.shape[3]])
        if self.k.shape[2] % x.shape[2]:
            raise ValueError(f"{name} must have a number of heads that divides {self.k.shape[2]}, got {x.shape[2]}")
        x = x.to(self.k.dtype)
        return expand_heads(l2norm(x) if self.normalise else x, self.k.shape[2])

    def with_keys(self, k: Tensor) -> Inputs:
        return replace(self, k=k)

    def gate(self, name: str, x: Tensor | None, empty: float) -> Tensor:
        """A scalar gate `[B, T, HV]`; None means the constant `empty`."""
        if x is None:
            return self.k.new_full(self.k.shape[:3], empty)
        _check_shape(name, x, list(self.k.shape[:3]))
        return x.to(self.k.dtype)

    def log_decay(self, name: str, x: Tensor | None, vector: bool = False) -> Tensor:
        """Logarithms of a decay, all <= 0 (`-inf` forgets everything); None means no decay."""
        if x is None:
            return self.gate(name, None, 0.0)
        _check_shape(name, x, list(self.k.shape if vector else self.k.shape[:3]))
        # A look at the values would make a GPU wait for the host, and cannot be traced; on a CPU it costs nothing.
        if x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling():
            largest = x.detach().max().item()
            if not largest <= 0:
                raise ValueError(f"{name} must hold logarithms of decays, all <= 0, but its largest value is {largest}")
        return x.to(self.k.dtype)

    def finish(
        self, output: Tensor, final_state: Tensor | None, output_final_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What the public functions return: outputs in the dtype of v, and the final states if they were asked for."""
        if final_state is None or not output_final_state:
            return output.to(self.output_dtype), None
        return output.to(self.output_dtype), final_state.transpose(-1, -2) if self.state_v_first else final_state


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | SequenceBoundaries | None,
    normalise: bool = False,
    state_v_first: bool = False,
) -> Inputs:
    """Check q, k, v and the state, and bring them to the dtype and the heads of the computation."""
    _check_shape("q", q, ["B", "T", "H", "K"])
    _check_shape("k", k, list(q.shape))
    _check_shape("v", v, [*q.shape[:2], "HV", "V"])
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(f"v must have a multiple of the {q.shape[2]} heads of q and k, got {v.shape[2]}")
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {x.dtype}")
    boundaries = None
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs one packed row (B == 1), got q with B == {q.shape[0]}")
        boundaries = SequenceBoundaries.from_cu_seqlens(cu_seqlens, q.shape[1])
    count = q.shape[0] if boundaries is None else boundaries.num_sequences
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    expected = [count, v.shape[2], q.shape[3], v.shape[3]]
    if initial_state is not None and state_v_first:
        initial_state = initial_state.transpose(-1, -2)
    if initial_state is None:
        state = q.new_zeros(expected, dtype=dtype)
    else:
        _check_shape("initial_state", initial_state, expected)
        state = initial_state.to(dtype)
    output_dtype, heads = v.dtype, v.shape[2]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if normalise:
        q, k = l2norm(q), l2norm(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = expand_heads(q, heads), expand_heads(k, heads)
    return Inputs(q, k, v, state, boundaries, output_dtype, normalise, state_v_first)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H, ...]` to `[B, T, heads, ...]`: every head serves `heads // H` neighbours."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def _check_shape(name: str, x: Tensor, expected: list) -> None:
    """`expected` mixes sizes and, where any size will do, a letter that names it."""
    wanted = "[" + ", ".join(map(str, expected)) + "]"
    fits = x.dim() == len(expected) and all(isinstance(e, str) or e == n for e, n in zip(expected, x.shape))
    if not fits:
        raise ValueError(f"{name} must have shape {wanted}, got {list(x.shape)}")

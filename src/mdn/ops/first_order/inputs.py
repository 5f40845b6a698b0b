"""What every first-order rule is given, what is checked about it, and how it is prepared for computing.

All rules are special cases of one, the momentum delta rule with mu = 0 and eta = 1:

    r_t = v_t - S_{t-1}^T p_t                      prediction error; without p, r_t = v_t
    S_t = alpha_t S_{t-1} + beta_t k_t r_t^T       alpha_t is one number per head, or one per key dimension
    o_t = scale * S_t^T q_t

RWKV-7 writes what the probe finds along a key of its own: S_t = alpha_t S_{t-1} + k_t v_t^T + e_t (S_{t-1}^T p_t)^T.
With e = -beta k this is the line above.

Everything is computed in float32 (float64 for float64 inputs) with HV heads: value head j reads key head
``j // (HV // H)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.l2norm import l2norm
from mdn.ops.momentum.interface import compute_dtype
from mdn.ops.shared_checks import (
    check_decode_state,
    check_floating,
    check_log_decay,
    check_packed,
    values_can_be_read,
)


class FirstOrderTensors(NamedTuple):
    """The tensors of one call, without T in a decode step."""

    q: Tensor
    """[B, T, H, K]"""
    k: Tensor
    """[B, T, H, K]"""
    v: Tensor
    """[B, T, HV, V]"""
    p: Tensor | None = None
    """[B, T, H or HV, K]: what the state is probed with; None means k, if the rule erases at all"""
    log_alpha: Tensor | None = None
    """[B, T, HV], or [B, T, HV, K] for a decay per key dimension; None means no decay"""
    beta: Tensor | None = None
    """[B, T, HV]; None means ones"""
    erase_key: Tensor | None = None
    """[B, T, H or HV, K]: e, along which the probed value is written; None means -beta k"""


class FirstOrderOutput(NamedTuple):
    """What the public functions return."""

    o: Tensor
    """[B, T, HV, V], dtype of v"""
    final_state: Tensor | None
    """[N, HV, K, V] in float32 (float64 for float64 inputs), or None when it was not requested"""


class PreparedTensors(NamedTuple):
    """The same tensors in the dtype of the computation, all with HV heads; ``q`` is scaled, ``p`` None means p = 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    log_alpha: Tensor
    beta: Tensor | None
    erase_key: Tensor | None

    def token(self, t: int) -> PreparedTensors:
        """Token t of every row, ``[B, HV, D]``."""
        p, beta, e = (None if x is None else x[:, t] for x in (self.p, self.beta, self.erase_key))
        return PreparedTensors(self.q[:, t], self.k[:, t], self.v[:, t], p, self.log_alpha[:, t], beta, e)


def prepare(
    tensors: FirstOrderTensors, scale: float, normalise: bool, erases: bool, p_times_alpha: bool
) -> PreparedTensors:
    """``normalise`` divides q, k and p by their norms; ``p_times_alpha`` takes the error at the decayed state."""
    dtype, heads = compute_dtype(tensors.q, tensors.k, tensors.v), tensors.v.shape[-2]

    def key(x: Tensor) -> Tensor:
        x = x.to(dtype)
        return expand_heads(l2norm(x) if normalise else x, heads)

    q, k, v = key(tensors.q), key(tensors.k), tensors.v.to(dtype)
    q = q if scale == 1 else q * scale
    log_alpha = v.new_zeros(v.shape[:-1]) if tensors.log_alpha is None else tensors.log_alpha.to(dtype)
    p = None
    if erases:
        p = k if tensors.p is None else key(tensors.p)
        if p_times_alpha:
            p = (log_alpha if log_alpha.dim() == p.dim() else log_alpha.unsqueeze(-1)).exp() * p
    beta = None if tensors.beta is None else tensors.beta.to(dtype)
    return PreparedTensors(q, k, v, p, log_alpha, beta, None if tensors.erase_key is None else key(tensors.erase_key))


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """``[..., H, K]`` to ``[..., heads, K]``: every head serves ``heads // H`` neighbours."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)


# ------------------------------------------------------------------------------------------------------------ checks


def check_tensors(tensors: FirstOrderTensors, names: Mapping[str, str], optional: tuple[str, ...], rank: int) -> None:
    """Types, shapes and devices. ``names`` are the caller's names of the tensors that the rule has."""
    for field, name in names.items():
        x = getattr(tensors, field)
        if x is not None or field not in optional:
            check_floating(name, x)
    q, k, v = tensors.q, tensors.k, tensors.v
    before = ("B", "T") if rank == 4 else ("B",)
    check_shape(names["q"], q, (*before, "H", "K"))
    check_shape(names["k"], k, q.shape)
    check_shape(names["v"], v, (*q.shape[:-2], "HV", "V"))
    heads, value_heads, key_dim = q.shape[-2], v.shape[-2], q.shape[-1]
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(f"{names['v']} must have a multiple of the {heads} heads of q and k, got {value_heads}")
    if key_dim == 0 or v.shape[-1] == 0:
        raise ValueError(f"head dimensions must be positive, got K = {key_dim} and V = {v.shape[-1]}")
    for field, name in names.items():
        x = getattr(tensors, field)
        if x is None:
            continue
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of {names['q']}, {q.device}, got {x.device}")
        if field in ("p", "erase_key"):
            check_shape(name, x, (*q.shape[:-2], "H or HV", key_dim))
            if x.shape[-2] == 0 or value_heads % x.shape[-2]:
                raise ValueError(f"{name} must have heads that divide the {value_heads} of v, got {x.shape[-2]}")


def check_gate_shapes(tensors: FirstOrderTensors, names: Mapping[str, str], vector: bool) -> None:
    per_head = tensors.v.shape[:-1]
    if tensors.log_alpha is not None:
        check_shape(names["log_alpha"], tensors.log_alpha, (*per_head, tensors.q.shape[-1]) if vector else per_head)
    if tensors.beta is not None:
        check_shape(names["beta"], tensors.beta, per_head)


def check_gate_values(tensors: FirstOrderTensors, names: Mapping[str, str]) -> None:
    """Log-decays <= 0 (``-inf`` forgets everything), beta finite; where values can be read."""
    if not values_can_be_read(tensors.v):
        return
    if tensors.log_alpha is not None:
        check_log_decay(names["log_alpha"], tensors.log_alpha)
    if tensors.beta is not None and not bool(tensors.beta.isfinite().all()):
        raise ValueError(f"{names['beta']} must be finite, got NaN or inf")


def check_step_state(state: Tensor, tensors: FirstOrderTensors, has_slots: bool) -> None:
    """A state ``[slots, HV, K, V]`` that can be updated in place; without slots, row b is slot b."""
    q, v = tensors.q, tensors.v
    if not isinstance(state, Tensor):
        raise ValueError(f"state must be a torch.Tensor, got {type(state).__name__}")
    rows = state.shape[:1] if has_slots else v.shape[:1]
    dtype = compute_dtype(q, tensors.k, v)
    check_decode_state("state", state, [*rows, v.shape[1], q.shape[2], v.shape[2]], dtype, q)


def check_boundaries(cu_seqlens: Tensor | SequenceBoundaries | None, q: Tensor) -> SequenceBoundaries | None:
    if cu_seqlens is None:
        return None
    check_packed(cu_seqlens, q)
    return SequenceBoundaries.from_cu_seqlens(cu_seqlens, q.shape[1]).to(q.device)


def check_chunk_size(chunk_size: int) -> None:
    """Chunks are halved again and again (chunk_vector.py)."""
    valid = isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size > 0
    if not valid or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size!r}")


def check_shape(name: str, x: Tensor, expected: tuple[int | str, ...]) -> None:
    """``expected`` mixes sizes and, where any size will do, a letter that names it."""
    if x.dim() == len(expected) and all(isinstance(e, str) or e == n for e, n in zip(expected, x.shape)):
        return
    raise ValueError(f"{name} must have shape [{', '.join(map(str, expected))}], got {list(x.shape)}")

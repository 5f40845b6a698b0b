"""Checks of the arguments of the momentum delta rule: errors name the argument, what was given and what is expected."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import RuleTensors, StepState, compute_dtype
from mdn.ops.shared_checks import (
    check_decode_state,
    check_log_decay,
    check_packed,
    check_weight,
    in_plain_memory,
    values_can_be_read,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bundle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor | None,
    eta: Tensor | None,
    direct: Tensor | None,
    initial_state: Tensor | tuple[Tensor, Tensor | None] | None = None,
) -> RuleTensors:
    """The tensors of a call as given, with ones where beta or eta is None."""
    if (beta is None or eta is None) and isinstance(v, Tensor):  # any other v is refused by ``check_tensors``
        ones = torch.ones(v.shape[:-1], dtype=compute_dtype(v), device=v.device)
        beta, eta = ones if beta is None else beta, ones if eta is None else eta
    stacked = None if initial_state is None else stacked_state(initial_state)
    return RuleTensors(q, k, v, p, log_alpha, log_mu, beta, eta, direct, stacked)


def check_tensors(tensors: RuleTensors, rank: int, vector: bool = False) -> None:
    """Shapes, dtypes and devices of q, k, v, p ([..., H, D], ``rank`` dimensions) and the gates: [..., HV], but
    log_alpha [..., HV, K] in the rule with ``vector`` decays, and log_mu either."""
    q, k, v, p = tensors.q, tensors.k, tensors.v, tensors.p
    for name, x in tensors._asdict().items():
        if name != "initial_state" and not isinstance(x, Tensor) and not (x is None and name in ("p", "direct")):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    leading = "[B, T, H, D]" if rank == 4 else "[B, H, D]"
    for name, x in (("q", q), ("k", k), ("v", v), ("p", p)):
        if x is not None and x.dim() != rank:
            raise ValueError(f"{name} must have shape {leading}, got {list(x.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q, {list(q.shape)}, got {list(k.shape)}")
    if p is not None and p.shape != k.shape:
        raise ValueError(f"p must have the shape of k, {list(k.shape)}, got {list(p.shape)}")
    if v.shape[:-2] != q.shape[:-2]:
        raise ValueError(f"v must begin with {list(q.shape[:-2])} as q does, got {list(v.shape)}")
    if v.shape[-2] == 0 or q.shape[-2] == 0 or v.shape[-2] % q.shape[-2]:
        raise ValueError(f"v must have a multiple of the {q.shape[-2]} heads of q and k, got {v.shape[-2]} heads")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head dimensions must be positive, got {q.shape[-1]} for q, k and {v.shape[-1]} for v")
    _check_dtypes_and_devices(tensors)
    for name, gate in tensors.gates.items():
        per_channel = vector and (name == "log_alpha" or (name == "log_mu" and gate.dim() == rank))
        expected = [*v.shape[:-1], q.shape[-1]] if per_channel else [*v.shape[:-1]]
        if list(gate.shape) != expected:
            what = "one per value head and key dimension" if per_channel else "one per value head"
            raise ValueError(f"{name} must have shape {expected}, {what}, got {list(gate.shape)}")


def _check_dtypes_and_devices(tensors: RuleTensors) -> None:
    q = tensors.q
    for name, x in tensors._asdict().items():
        if x is None or name == "initial_state":
            continue
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if name in ("k", "v", "p") and x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def state_pair(name: str, state: Tensor | tuple[Tensor, Tensor | None] | None) -> tuple[Tensor, Tensor | None]:
    """S and M of a stacked state or of the pair itself, whose M may be None."""
    if (
        not isinstance(state, (tuple, list, Tensor))
        or (isinstance(state, Tensor) and state.dim() == 0)
        or len(state) != 2
    ):
        given = f"shape {list(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"{name} must be a tensor [2, slots, HV, K, V] or the pair (S, M), got {given}")
    S, M = state[0], state[1]
    if not isinstance(S, Tensor) or not (M is None or isinstance(M, Tensor)):
        letter, given = ("M", M) if isinstance(S, Tensor) else ("S", S)
        raise ValueError(f"{name} must be a pair of tensors (S, M), but {letter} is {type(given).__name__}")
    return S, M


def stacked_state(initial_state: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """[2, N, HV, K, V] of a state or a pair (S, M); no copy when the pair are two parts of one tensor."""
    if isinstance(initial_state, Tensor):
        return initial_state
    S, M = state_pair("initial_state", initial_state)
    if M is None:
        M = torch.zeros_like(S)
    if S.shape != M.shape or S.dtype != M.dtype or S.device != M.device:
        raise ValueError(
            "initial_state must be a pair (S, M) of the same shape, dtype and device, "
            f"got {list(S.shape)} {S.dtype} {S.device} and {list(M.shape)} {M.dtype} {M.device}"
        )
    distance = _distance(S, M)
    return torch.stack([S, M]) if distance is None else S.as_strided((2, *S.shape), (distance, *S.stride()))


def _distance(S: Tensor, M: Tensor) -> int | None:
    """How many elements M lies behind S in one tensor, of which they are two parts that lie alike. None if they are
    not, and wherever something follows M, which a view of S does not mention."""
    if torch.compiler.is_compiling() or not in_plain_memory((S, M)) or S.is_meta:
        return None
    if forward_ad._current_level >= 0 or S.requires_grad or M.requires_grad or S.stride() != M.stride():
        return None
    distance = M.storage_offset() - S.storage_offset()
    same = S.untyped_storage().data_ptr() == M.untyped_storage().data_ptr()
    return int(distance) if same and distance > 0 else None


def check_boundaries(cu_seqlens: Tensor | SequenceBoundaries | None, q: Tensor) -> SequenceBoundaries | Tensor | None:
    """The boundaries as the one object that every backend gets; a tensor only where its values cannot be read now."""
    if cu_seqlens is None:
        return None
    check_packed(cu_seqlens, q)
    only_shapes = q.is_meta and isinstance(cu_seqlens, Tensor) and cu_seqlens.is_meta
    if torch.compiler.is_compiling() or only_shapes:
        return cu_seqlens
    return SequenceBoundaries.from_cu_seqlens(cu_seqlens, q.shape[1]).to(q.device)


def check_chunk_size(chunk_size: int) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or not 1 <= chunk_size <= 256:
        raise ValueError(f"chunk_size must be an integer from 1 to 256, got {chunk_size!r}")


def check_probe(p_times_alpha: bool, lookahead: bool) -> bool:
    """Whether p is to be multiplied by alpha: not with look-ahead, where the state that it reads has decayed."""
    if lookahead and not p_times_alpha:
        raise ValueError("lookahead needs use_p_times_alpha=True: the error is taken at the decayed state, got False")
    return p_times_alpha and not lookahead


def check_step_state(state: StepState, tensors: RuleTensors) -> None:
    """S and M must be [slots, HV, K, V] and such that they can be updated in place."""
    q, v = tensors.q, tensors.v
    slots = v.shape[0] if state.state_indices is None else state.S.shape[0]
    expected = [slots, v.shape[1], q.shape[2], v.shape[2]]
    check_decode_state("S of the state", state.S, expected, compute_dtype(q), q)
    if state.M is not None:
        check_decode_state("M of the state", state.M, expected, compute_dtype(q), q)


def check_gate_values(tensors: RuleTensors) -> None:
    """Logs must be <= 0 (-inf is a hard zero), other gates >= 0, nothing NaN; where values can be read."""
    if not values_can_be_read(tensors.log_alpha):
        return
    check_log_decay("log_alpha", tensors.log_alpha)
    check_log_decay("log_mu", tensors.log_mu)
    check_weight("beta", tensors.beta)
    check_weight("eta", tensors.eta)
    if tensors.direct is not None:
        check_weight("direct", tensors.direct)

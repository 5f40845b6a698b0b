"""Linear attention: S_t = S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t, divided by q_t . z_t if it is normalised.

Shapes, names and defaults as in `scalar_rules`, which has the other rules with one decay per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.inputs import FirstOrderOutput, FirstOrderTensors, expand_heads
from mdn.ops.first_order.rule import Rule, SharedArguments
from mdn.ops.shared_checks import check_apart, check_floating, in_plain_memory, may_overlap, refuse_gradients

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan

LINEAR_ATTN = Rule("linear_attn", {"q": "q", "k": "k", "v": "v"}, erases=False, fla_options=("normalize",))
LinearState = Tensor | tuple[Tensor, Tensor]
"""S [N, H, K, V], or with the normaliser (S, z [N, 1, H, K])"""
EPSILON = 1e-10


class LinearAttentionOutput(NamedTuple):
    o: Tensor
    final_state: LinearState | None


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearState | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
    *,
    chunk_size: int = 64,
    backend: str = "auto",
    check_gates: bool = True,
    context_parallel: ContextParallelPlan | None = None,
    **hints: Any,
) -> LinearAttentionOutput:
    """S_t = S_{t-1} + k_t v_t^T. With ``normalize``, o_t is divided by q_t . z_t with z_t = k_1 + ... + k_t, and the
    state is (S, z ``[N, 1, HV, K]``)."""
    shared = SharedArguments(
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        normalize=normalize,
        context_parallel=context_parallel,
        check_gates=check_gates,
    )
    tensors = FirstOrderTensors(q, k, v)

    def rule(tensors: FirstOrderTensors, shared: SharedArguments) -> FirstOrderOutput:
        return LINEAR_ATTN.chunk(tensors, shared, chunk_size, backend, hints)

    LINEAR_ATTN.check(tensors, scale)
    if LINEAR_ATTN.backend_for(tensors, backend) == "fla":
        return LinearAttentionOutput(*rule(tensors, shared))
    return _linear_attention(rule, tensors, shared)


def recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearState | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | SequenceBoundaries | None = None,
) -> LinearAttentionOutput:
    """The definition of ``chunk_linear_attn``, token by token."""
    tensors = FirstOrderTensors(q, k, v)
    LINEAR_ATTN.check(tensors, scale)
    shared = SharedArguments(scale, initial_state, output_final_state, cu_seqlens, normalize=normalize)
    return _linear_attention(LINEAR_ATTN.recurrent, tensors, shared)


def linear_attn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    z_state: Tensor | None = None,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    backend: str = "auto",
    check_gates: bool = True,
) -> Tensor:
    """One token; with ``z_state`` ``[slots, HV, K]`` the output is normalised. Both states change in place.

    ``check_gates`` looks at the values of the slots (CPU tensors only); linear attention has no gates.
    """
    tensors, options = FirstOrderTensors(q, k, v), (scale, state_indices, backend, check_gates)
    if z_state is None:
        return LINEAR_ATTN.step(tensors, state, *options)
    check_floating("v", v)
    check_floating("state", state)
    if not isinstance(z_state, Tensor) or z_state.shape != state.shape[:3] or z_state.dtype != state.dtype:
        given = [z_state.dtype, list(z_state.shape)] if isinstance(z_state, Tensor) else type(z_state).__name__
        raise ValueError(f"z_state must be {state.dtype} {list(state.shape[:3])}, as the state without V, got {given}")
    if z_state.device != state.device:
        raise ValueError(f"z_state must be on the device of the state, {state.device}, got {z_state.device}")
    if may_overlap(z_state):
        raise ValueError(
            f"z_state must not overlap itself to be updated in place, got strides {list(z_state.stride())}"
        )
    if not torch.compiler.is_compiling() and in_plain_memory((state, z_state)):
        check_apart("state and z_state", state, z_state.unsqueeze(-1))
    refuse_gradients("linear_attn_step", "linear_attn", (z_state,), ("z_state",))
    # The state changes from here on, and nothing about z_state may be refused any more.
    wide = v.to(torch.promote_types(v.dtype, torch.float32))  # so that o is rounded once, after the division
    o = LINEAR_ATTN.step(tensors._replace(v=wide), state, *options)
    ones = z_state.new_ones(*v.shape[:2], 1)
    normaliser = LINEAR_ATTN.step(tensors._replace(v=ones), z_state.unsqueeze(-1), *options)
    return (o / (normaliser + EPSILON)).to(v.dtype)


def _linear_attention(
    rule: Callable[[FirstOrderTensors, SharedArguments], FirstOrderOutput],
    tensors: FirstOrderTensors,
    shared: SharedArguments,
) -> LinearAttentionOutput:
    """z is the state of one more value, constantly one: carried as one more column, it needs no code of its own."""
    v, state = tensors.v, shared.initial_state
    if not shared.normalize:
        if isinstance(state, tuple):
            raise ValueError("initial_state must be a tensor with normalize=False, got a tuple (S with its normaliser)")
        return LinearAttentionOutput(*rule(tensors, shared))
    dtype = torch.promote_types(v.dtype, torch.float32)
    values = torch.cat([v.to(dtype), v.new_ones(*v.shape[:-1], 1, dtype=dtype)], -1)
    state = None if state is None else _with_normaliser(state, v.shape[2])
    o, final = rule(tensors._replace(v=values), shared._replace(initial_state=state))
    o = o[..., :-1] / (o[..., -1:] + EPSILON)
    return LinearAttentionOutput(
        o.to(v.dtype), None if final is None else (final[..., :-1], final[..., -1].unsqueeze(1))
    )


def _with_normaliser(state: LinearState, heads: int) -> Tensor:
    """``[N, HV, K, V + 1]`` from S ``[N, HV, K, V]`` and z ``[N, 1, HV or H, K]``; S alone starts with z = 0."""
    S, z = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if not isinstance(S, Tensor) or S.dim() != 4 or S.shape[1] != heads:
        given = list(S.shape) if isinstance(S, Tensor) else type(S).__name__
        raise ValueError(f"initial_state must be S [N, HV, K, V] or the pair (S, z [N, 1, HV, K]), got {given}")
    if z is None:
        z = S.new_zeros(S.shape[0], 1, *S.shape[1:3])
    fits = isinstance(z, Tensor) and z.dim() == 4 and (*z.shape[:2], z.shape[3]) == (S.shape[0], 1, S.shape[2])
    if not fits or z.shape[2] == 0 or heads % z.shape[2]:
        given = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise ValueError(f"initial_state must be a pair (S, z) with z {[S.shape[0], 1, *S.shape[1:3]]}, got z {given}")
    return torch.cat([S, expand_heads(z, heads)[:, 0].unsqueeze(-1).to(S.dtype)], -1)

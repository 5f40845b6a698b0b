"""Calls of csrc/vector_decay.h: the rules with a decay per key dimension (GLA, KDA, RWKV-7), float32.

All tensors have the heads of v, and q is scaled (``mdn.ops.first_order.inputs.PreparedTensors``): shapes
``[B, T, H, K]``, v ``[B, T, H, V]``, states ``[N, H, K, V]``; a decode step has no T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.cpu.bindings import VectorDecay, VectorStep, call, point, point_at_offsets
from mdn.ops.cpu.chunked import offsets_of
from mdn.ops.cpu.decode import check_state

SMALL = 1 << 16
"""state elements below which one thread is fastest"""


class VectorTensors(NamedTuple):
    """Contiguous float32; without p (GLA) nothing is erased, with e (RWKV-7) along a key of its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    e: Tensor | None
    log_alpha: Tensor
    initial: Tensor


class VectorOutput(NamedTuple):
    o: Tensor
    final: Tensor
    solved: Tensor
    """solution of the triangular systems (33), all that backward needs beside the inputs; empty without p or if not
    kept"""


def forward(
    tensors: VectorTensors, boundaries: SequenceBoundaries | None, save: bool, outputs: bool = True
) -> VectorOutput:
    """``outputs`` False: only the final states; o is empty."""
    problem = _problem(tensors, boundaries)
    saves = save and tensors.p is not None
    o = torch.empty_like(tensors.v) if outputs else tensors.v.new_empty(0)
    final = torch.empty_like(tensors.initial)
    solved = torch.empty_like(tensors.v) if saves else tensors.v.new_empty(0)
    point(problem, o=o if outputs else None, final=final, solved=solved if saves else None)
    call("mdn_vector_forward", problem)
    return VectorOutput(o, final, solved)


def backward(
    grad_o: Tensor,
    grad_final: Tensor,
    tensors: VectorTensors,
    solved: Tensor,
    boundaries: SequenceBoundaries | None,
) -> VectorTensors:
    """Gradients of all tensors, None where one is None."""
    problem = _problem(tensors, boundaries)
    gradients = VectorTensors(*(None if x is None else torch.empty_like(x) for x in tensors))  # type: ignore[arg-type]
    point(problem, grad_o=grad_o, grad_final=grad_final, solved=solved)
    point(problem, **{f"grad_{name}": gradient for name, gradient in gradients._asdict().items()})
    call("mdn_vector_backward", problem)
    return gradients


def _problem(tensors: VectorTensors, boundaries: SequenceBoundaries | None) -> VectorDecay:
    batch, time, heads, key_dim = tensors.q.shape
    offsets = offsets_of(boundaries, batch, time)
    is_small = tensors.q.numel() * tensors.v.shape[-1] < SMALL
    problem = VectorDecay(
        sequences=len(offsets) - 1,
        heads=heads,
        key_dim=key_dim,
        value_dim=tensors.v.shape[-1],
        threads=1 if is_small else torch.get_num_threads(),
    )
    point_at_offsets(problem, offsets)
    point(problem, **tensors._asdict())
    return problem


def step_(tensors: VectorTensors, slots: Tensor | None) -> Tensor:
    """One token for every row; ``tensors.initial`` is the state ``[slots, H, K, V]``, which changes in place."""
    S, (batch, heads, key_dim) = tensors.initial, tensors.q.shape
    check_state("S", S, (S.shape[0], heads, key_dim, tensors.v.shape[-1]))
    o = torch.empty_like(tensors.v)
    is_small = batch * heads * key_dim * tensors.v.shape[-1] < SMALL
    struct = VectorStep(
        batch=batch,
        slot_count=S.shape[0],
        heads=heads,
        key_dim=key_dim,
        value_dim=tensors.v.shape[-1],
        threads=1 if is_small else torch.get_num_threads(),
        S_strides=S.stride()[:3],
    )
    q, k, v, p, e, log_alpha, _ = tensors
    point(struct, q=q, k=k, v=v, p=p, e=e, log_alpha=log_alpha, S=S, slots=slots, o=o)
    call("mdn_vector_step", struct, changed=(S,))
    return o

"""The forward and the backward pass over batches and packs, for scalar and for vector decays.

Work proceeds in the slabs, groups and rounds of ``mdn.ops.chunking``: what does not depend on the states is done for a
whole group at once, the states advance round by round (``rounds.py``). Subclasses of ``ChunkInputs`` know the decays:
they make the maps of a group's chunks, and the gradients of what these were made of. Numbers in parentheses: equations
of docs/derivation.md. Z = chunks x value heads of a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import ChunkGroup, Rectangle, Slab
from mdn.ops.l2norm import L2NORM_EPS
from mdn.ops.momentum.chunk_math import ChunkGradients
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors, compute_dtype
from mdn.ops.momentum.rounds import (
    ChunkMap,
    backward_rounds,
    forward_rounds,
    members_of,
    put_members,
    stacked,
    states_before_chunks,
    unstack,
)
from mdn.ops.momentum.scratch import BackwardRows, ForwardRows, GroupSize, Kind, LoadedScratch, scratch_pool

Chunk = TypeVar("Chunk", bound=ChunkMap)

# ------------------------------------------------------------------------------------------------------------- passes


def forward_pass(
    chunks: ChunkInputs[Chunk],
    slabs: tuple[Slab, ...],
    boundaries: SequenceBoundaries | None,
    save_residual: bool,
    starts: list[Tensor] | None = None,
) -> ForwardResult:
    """``starts`` gets a copy of X before every group, one after the other."""
    v = chunks.v
    final_state = chunks.tensors.state_to_update(boundaries)
    outputs = chunks.options.outputs
    o = torch.empty(v.shape if outputs else (0,), dtype=v.dtype, device=v.device)
    residual = torch.empty(v.shape if save_residual else (0,), dtype=chunks.dtype, device=v.device)
    for slab in slabs:
        X_slab = stacked(final_state, slab)
        for group in slab.groups:
            scratch = chunks.scratch(chunks.forward_scratch, group)
            chunk, _ = chunks.prepare(group, scratch)
            group.load(v, scratch.residual, 1.0, scratch.gathered)
            X = members_of(group, X_slab, chunks.heads)
            if starts is not None:
                starts.append(X.clone())
            forward_rounds(chunk, group, X, scratch, outputs, chunks.heads)
            put_members(group, X, X_slab, chunks.heads)
            if outputs:
                group.store(scratch.output, o, chunks.options.scale, scratch.gathered)
            if save_residual:
                group.store(scratch.residual, residual, 1.0, scratch.gathered)
        unstack(X_slab, final_state, slab)
    chunks.pool.end_call()
    return ForwardResult(o, final_state, residual)


def backward_pass(
    chunks: ChunkInputs[Chunk],
    slabs: tuple[Slab, ...],
    starts: Iterable[list[Tensor]],
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
) -> RuleTensors:
    """``starts``: for every slab X before each of its groups."""
    grad_o, heads = grad_o.contiguous(), chunks.heads
    grad_states = torch.zeros_like(chunks.tensors.state_to_update(boundaries))
    if grad_final_state is not None:
        grad_states.copy_(grad_final_state)
    grads = GradientOutputs(chunks.tensors, chunks.options)
    for slab, of_slab in zip(slabs, starts):
        grad_X_slab = stacked(grad_states, slab)
        for group, start in zip(reversed(slab.groups), reversed(of_slab)):
            scratch = chunks.scratch(chunks.backward_scratch, group)
            chunk, norms = chunks.prepare(group, scratch)
            group.load(residual, scratch.residual, 1.0, scratch.gathered)
            X = states_before_chunks(chunk, group, start, scratch, heads)
            group.load(grad_o, scratch.grad_target_O[:, group.size :], chunks.options.scale, scratch.gathered)
            grad_X = members_of(group, grad_X_slab, heads)
            backward_rounds(chunk, group, grad_X, scratch, heads)
            put_members(group, grad_X, grad_X_slab, heads)
            group.store(scratch.grad_target_O[:, : group.size], grads.v, 1.0, scratch.gathered)  # (10)
            grads.store(chunks.gradients(chunk, X, scratch), chunk, norms, group, scratch)
        unstack(grad_X_slab, grad_states, slab)
    chunks.pool.end_call()
    return grads.results(grad_states)


# ------------------------------------------------------------------------------------------------------ inputs, outputs


class InverseNorms(NamedTuple):
    """One over the L2 norm of each vector, n in (18); ones when vectors are not normalised, zeros where filled up."""

    q: Tensor  # [Z, C], as are all
    k: Tensor
    p: Tensor


class ChunkInputs(Generic[Chunk]):
    """Loads the chunks of a group in the dtype of the computation; q, k and p are normalised on the way."""

    forward_scratch: ClassVar[type[ForwardRows]]
    backward_scratch: ClassVar[type[BackwardRows]]

    def __init__(self, tensors: RuleTensors, options: RuleOptions):
        self.tensors = tensors
        self.q, self.k, self.v = tensors.q.contiguous(), tensors.k.contiguous(), tensors.v.contiguous()
        self.p = None if tensors.p is None else tensors.p.contiguous()
        self.options, self.dtype = options, compute_dtype(tensors.q)
        self.heads = self.v.shape[-2]
        self.pool = scratch_pool(self.q.device, self.dtype)
        gates = [gate.to(self.dtype) for gate in tensors.scalar_gates.values()]
        norm_q, norm_k = self._inverse_norm(self.q), self._inverse_norm(self.k)
        norm_p = norm_k if self.p is None else self._inverse_norm(self.p)
        self.scalars = torch.stack([norm_q, norm_k, norm_p, *gates], -1)  # [B, T, HV, 3 + gates]

    def prepare(self, group: ChunkGroup, scratch: Any) -> tuple[Chunk, InverseNorms]:
        """All of the group's chunks that does not depend on the states."""
        raise NotImplementedError

    def gradients(self, chunk: Chunk, X: Tensor, scratch: Any) -> ChunkGradients:
        """From what ``backward_rounds`` has left in the scratch memory, and X [Z, 2K, V] before each chunk."""
        raise NotImplementedError

    def _inverse_norm(self, x: Tensor) -> Tensor:
        """[B, T, HV]"""
        if self.options.l2norm:
            inverse: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=self.dtype).square_().add_(L2NORM_EPS).rsqrt_()
        else:
            inverse = x.new_ones(x.shape[:-1], dtype=self.dtype)
        return inverse.repeat_interleave(self.heads // x.shape[-2], dim=-1)

    def scratch(self, kind: type[Kind], group: ChunkGroup) -> Kind:
        gathers = not isinstance(group.source, Rectangle)
        dims = (self.q.shape[-1], self.v.shape[-1], self.scalars.shape[-1], self.p is not None, gathers)
        return self.pool.take(kind, GroupSize(group.chunks * self.heads, group.size, *dims))

    def load_vectors(self, group: ChunkGroup, norms: InverseNorms, scratch: LoadedScratch) -> Tensor | None:
        """Fills ``scratch.pq`` [Z, 2C, K]; returns k [Z, C, K], or None if p is k."""
        size, pq = group.size, scratch.pq
        group.load(self.q, pq[:, size:], norms.q, scratch.gathered)
        group.load(self.k if self.p is None else self.p, pq[:, :size], norms.p, scratch.gathered)
        return None if self.p is None else group.load(self.k, scratch.k, norms.k, scratch.gathered)

    def load_scalars(self, group: ChunkGroup, scratch: LoadedScratch) -> tuple[dict[str, Tensor], InverseNorms]:
        """The gates that are one number per head and token, by name [Z, C], and the norms."""
        rows = scratch.scalars
        group.load(self.scalars, rows.movedim(0, -1), 1.0, scratch.gathered)
        if group.valid is not None:
            # Zero is neutral for all of them: log 1 for the decays, no write, vectors of length zero.
            rows = torch.where(group.valid.repeat_interleave(self.heads, dim=0), rows, 0.0)
        norm_q, norm_k, norm_p, *gates = rows
        return dict(zip(self.tensors.scalar_gates, gates)), InverseNorms(norm_q, norm_k, norm_p)


class GradientOutputs:
    """The gradients of the inputs, filled group by group."""

    def __init__(self, tensors: RuleTensors, options: RuleOptions):
        self.tensors, self.l2norm = tensors, options.l2norm
        self.q, self.k, self.v = (x.new_empty(x.shape) for x in (tensors.q, tensors.k, tensors.v))
        self.p = None if tensors.p is None else tensors.p.new_empty(tensors.p.shape)
        dtype = compute_dtype(tensors.q)
        self.scalar_gates = tensors.v.new_empty(*tensors.beta.shape, len(tensors.scalar_gates), dtype=dtype)
        self.vector_gates = {name: gate.new_empty(gate.shape) for name, gate in tensors.vector_gates.items()}

    def store(
        self, grad: ChunkGradients, chunk: ChunkMap, norms: InverseNorms, group: ChunkGroup, scratch: LoadedScratch
    ) -> None:
        gates = [getattr(grad.gates, name) for name in self.tensors.scalar_gates]
        group.store(torch.stack(gates, dim=-1), self.scalar_gates, 1.0, scratch.gathered)
        for name, out in self.vector_gates.items():
            group.store(getattr(grad.gates, name), out, 1.0, scratch.gathered)
        p, q = chunk.pq[:, : group.size], chunk.pq[:, group.size :]
        self._store_vector(grad.q, q, grad.along_q, norms.q, self.q, group, scratch)
        self._store_vector(grad.k, chunk.k, grad.along_k, norms.k, self.k, group, scratch)
        if self.p is not None and grad.p is not None:
            self._store_vector(grad.p, p, grad.along_p, norms.p, self.p, group, scratch)

    def _store_vector(
        self,
        gradient: Tensor,  # [Z, C, K]: of the unit vector; overwritten
        unit: Tensor,  # [Z, C, K]
        along: Tensor,  # [Z, C]: <unit, gradient>
        norm: Tensor,  # [Z, C]
        out: Tensor,  # [B, T, H, K]
        group: ChunkGroup,
        scratch: LoadedScratch,
    ) -> None:
        if self.l2norm:
            gradient.addcmul_(unit, along.unsqueeze(-1), value=-1)  # (18); the factor n is applied below
        shared = self.v.shape[-2] // out.shape[-2]
        if shared > 1:  # value heads that share a key head
            gradient = gradient.unflatten(0, (-1, shared)).sum(1)
            norm = norm.unflatten(0, (-1, shared))[:, 0]
        group.store(gradient, out, norm, scratch.gathered)

    def results(self, grad_states: Tensor) -> RuleTensors:
        given = self.tensors
        gates = zip(given.scalar_gates.items(), self.scalar_gates.unbind(-1))
        return RuleTensors(
            q=self.q,
            k=self.k,
            v=self.v,
            p=self.p,
            **{name: gradient.to(gate.dtype, copy=True) for (name, gate), gradient in gates},
            **self.vector_gates,
            initial_state=None if given.initial_state is None else grad_states.to(given.initial_state.dtype),
        )

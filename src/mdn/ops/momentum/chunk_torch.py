"""The ``torch`` backend: the chunk form of ``chunk_math.py`` on batches and packs, forward and backward.

Work proceeds in the slabs, groups and rounds of ``mdn.ops.chunking``: what does not depend on the states is done for a
whole group at once, the states advance round by round. Only the inputs and R are kept for the backward pass, which
rebuilds the states from R: first those before each group, then, group by group from the last one, those before each
chunk. Numbers in parentheses: equations of docs/derivation.md.

Z = chunks x value heads of a group. States are [2, N, HV, K, V] outside and X = [S; M], [sequences x HV, 2K, V], in a
slab. Groups are kept small enough for the caches: larger batches of products are slower on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import ChunkGroup, Rectangle, Sequences, Slab, plan_slabs
from mdn.ops.containment import at_the_end, damage_of, looks_damaged, repaired
from mdn.ops.l2norm import L2NORM_EPS
from mdn.ops.momentum.chunk_math import (
    ChunkGradients,
    GateRows,
    PreparedChunks,
    chunk_gradients,
    prepare,
    segment_decay,
    spread,
)
from mdn.ops.momentum.interface import ACCURATE_CHUNK, ForwardResult, RuleOptions, RuleTensors, compute_dtype
from mdn.ops.momentum.reference import step_
from mdn.ops.momentum.scratch import BackwardScratch, ChunkScratch, ForwardScratch, GroupSize, Kind, scratch_pool

__all__ = ["backward", "forward", "step_"]

# Rows (tokens of a head) worked on at once, and bytes of the states: larger batches of products fall out of the caches.
ROWS_AT_ONCE = 8192
STATE_BYTES_AT_ONCE = 16 * 2**20

# Rough figures of a laptop-class processor; only their ratios matter, for the choice of a chunk size.
FLOPS_PER_SECOND = 1.2e11
SECONDS_PER_ROUND = 1e-3  # some fifty calls of torch
SECONDS_PER_STATE_ENTRY = 4e-9  # all passes over one of the 2KV numbers of a chunk
SECONDS_PER_MASK_ENTRY = 4e-8  # the same for one of the C^2 coefficients


# ------------------------------------------------------------------------------------------------------------- passes


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    """(3) to (8). A token that is not finite damages itself and later ones, no earlier ones (mdn.ops.containment)."""
    result = _forward(tensors, boundaries, options, save_residual)
    if not looks_damaged(result.o):
        return result
    damage = damage_of(tensors.v, (tensors.k, tensors.p), boundaries)
    if not bool(damage.isnan().any()):
        return result  # the rule itself has diverged, or q was damaged, which concerns its own token only
    p = None if tensors.p is None else repaired(tensors.p)
    whole = tensors._replace(k=repaired(tensors.k), v=repaired(tensors.v), p=p)
    o, final_state, residual = _forward(whole, boundaries, options, save_residual)
    final_state = final_state + at_the_end(damage, boundaries).unsqueeze(-2)
    return ForwardResult(o + damage, final_state, residual + damage if save_residual else residual)


def _forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    v, dtype = tensors.v, compute_dtype(tensors.q)
    chunks = ChunkInputs(tensors, options)
    final_state = initial_states(tensors, boundaries)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    residual = torch.empty(v.shape if save_residual else (0,), dtype=dtype, device=v.device)
    for slab in plan(tensors, boundaries, options.chunk_size):
        X_slab = stacked(final_state, slab)
        for group in slab.groups:
            scratch = chunks.scratch(ForwardScratch, group)
            chunk, _ = chunks.prepare(group, scratch)
            group.load(chunks.v, scratch.target, 1.0, scratch.gathered)
            X = members_of(group, X_slab, chunks.heads)
            _forward_rounds(chunk, group, X, scratch, chunks.heads)
            put_members(group, X, X_slab, chunks.heads)
            group.store(scratch.output, o, options.scale, scratch.gathered)
            if save_residual:
                group.store(scratch.residual, residual, 1.0, scratch.gathered)
        unstack(X_slab, final_state, slab)
    chunks.pool.end_call()
    return ForwardResult(o, final_state, residual)


def _forward_rounds(chunk: PreparedChunks, group: ChunkGroup, X: Tensor, scratch: ForwardScratch, heads: int) -> None:
    """From the values in ``scratch.target`` to outputs (not yet scaled) and R [Z, C, V]; X is advanced in place."""
    size, target, residual, output = group.size, scratch.target, scratch.residual, scratch.output
    for first, end in group.rounds:
        z = slice(first * heads, end * heads)
        current = X[: z.stop - z.start]
        target[z].baddbmm_(chunk.read[z, :size], current)  # (6)
        chunk.solve(target[z], z, out=residual[z])  # (6)
        torch.bmm(chunk.read[z, size:], current, out=output[z])  # (7)
        chunk.advance(current, residual[z], z, out=current)  # (8)
    output.baddbmm_(chunk.attend, residual)  # (7)


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    chunks, grad_o = ChunkInputs(tensors, options), grad_o.contiguous()
    initial = initial_states(tensors, boundaries)
    grad_states = torch.zeros_like(initial)
    if grad_final_state is not None:
        grad_states.copy_(grad_final_state)
    grads = GradientOutputs(tensors, options)
    for slab in plan(tensors, boundaries, options.chunk_size):
        starts = _states_before_groups(chunks, slab, initial, residual)
        grad_X_slab = stacked(grad_states, slab)
        for group, start in zip(reversed(slab.groups), reversed(starts)):
            scratch = chunks.scratch(BackwardScratch, group)
            chunk, norms = chunks.prepare(group, scratch)
            group.load(residual, scratch.residual, 1.0, scratch.gathered)
            X = _states_before_chunks(chunk, group, start, scratch, chunks.heads)
            group.load(grad_o, scratch.grad_target_O[:, group.size :], options.scale, scratch.gathered)
            grad_X = members_of(group, grad_X_slab, chunks.heads)
            _backward_rounds(chunk, group, grad_X, scratch, chunks.heads)
            put_members(group, grad_X, grad_X_slab, chunks.heads)
            group.store(scratch.grad_target_O[:, : group.size], grads.v, 1.0, scratch.gathered)  # (10)
            grad = chunk_gradients(chunk, X, scratch.grad_X, scratch.residual, scratch.grad_target_O, scratch)
            grads.store(grad, chunk, norms, group, scratch)
        unstack(grad_X_slab, grad_states, slab)
    chunks.pool.end_call()
    return grads.results(grad_states)


def _backward_rounds(
    chunk: PreparedChunks, group: ChunkGroup, grad_X: Tensor, scratch: BackwardScratch, heads: int
) -> None:
    """Rounds in reverse: only what must be sequential, (9) to (11).

    ``scratch.grad_target_O`` [Z, 2C, V] comes with grad_O in its lower half and gets grad_target in its upper one: one
    product then serves both. Fills ``scratch.grad_X`` [Z, 2K, V] with the gradient of the state after every chunk, and
    moves ``grad_X`` to before the group.
    """
    size, grad_target_O, grad_after = group.size, scratch.grad_target_O, scratch.grad_X
    grad_target_O[:, :size] = torch.bmm(chunk.attend.mT, grad_target_O[:, size:])  # (9)
    arrived = 0  # rows of the state that a later round has passed on
    for number, (first, end) in reversed(list(enumerate(group.rounds))):
        z = slice(first * heads, end * heads)
        count = z.stop - z.start
        current = grad_after[z]
        current[arrived:] = grad_X[arrived:count]
        grad_residual = torch.baddbmm(grad_target_O[z, :size], chunk.write[z], current)  # (9)
        chunk.solve_transposed(grad_residual, z, out=grad_target_O[z, :size])  # (10)
        previous = grad_after[group.rounds[number - 1][0] * heads :] if number else grad_X
        chunk.retreat(current, z, out=previous[:count])  # (11)
        previous[:count].baddbmm_(chunk.read[z].mT, grad_target_O[z])  # (11)
        arrived = count


# ------------------------------------------------------------------------------------------------------ inputs, outputs


class InverseNorms(NamedTuple):
    """One over the L2 norm of each vector, n in (18); ones when vectors are not normalised, zeros where filled up."""

    q: Tensor  # [Z, C], as are all
    k: Tensor
    p: Tensor


class ChunkInputs:
    """Loads the chunks of a group in the dtype of the computation; q, k and p are normalised on the way."""

    def __init__(self, tensors: RuleTensors, options: RuleOptions):
        self.q, self.k, self.v = tensors.q.contiguous(), tensors.k.contiguous(), tensors.v.contiguous()
        self.p = None if tensors.p is None else tensors.p.contiguous()
        self.options, self.dtype = options, compute_dtype(tensors.q)
        self.heads = self.v.shape[-2]
        self.pool = scratch_pool(self.q.device, self.dtype)
        gates = [gate.to(self.dtype) for gate in tensors.gates.values()]
        norm_q, norm_k = self._inverse_norm(self.q), self._inverse_norm(self.k)
        norm_p = norm_k if self.p is None else self._inverse_norm(self.p)
        self.scalars = torch.stack([norm_q, norm_k, norm_p, *gates], -1)  # [B, T, HV, 7]; 8 with a direct write

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

    def prepare(self, group: ChunkGroup, scratch: ChunkScratch) -> tuple[PreparedChunks, InverseNorms]:
        gates, norms = self.load_scalars(group, scratch)
        size, pq = group.size, scratch.pq
        group.load(self.q, pq[:, size:], norms.q, scratch.gathered)
        group.load(self.k if self.p is None else self.p, pq[:, :size], norms.p, scratch.gathered)
        k = None if self.p is None else group.load(self.k, scratch.k, norms.k, scratch.gathered)
        return prepare(gates, pq, k, self.options, scratch), norms

    def load_scalars(self, group: ChunkGroup, scratch: ChunkScratch) -> tuple[GateRows, InverseNorms]:
        rows = group.load(self.scalars, scratch.scalars, 1.0, scratch.gathered).movedim(-1, 0).contiguous()
        if group.valid is not None:
            # Zero is neutral for all of them: log 1 for the decays, no write, vectors of length zero.
            rows = torch.where(group.valid.repeat_interleave(self.heads, dim=0), rows, 0.0)
        norm_q, norm_k, norm_p, *gates = rows
        return GateRows(*gates), InverseNorms(norm_q, norm_k, norm_p)


class GradientOutputs:
    """The gradients of the inputs, filled group by group."""

    def __init__(self, tensors: RuleTensors, options: RuleOptions):
        self.tensors, self.l2norm = tensors, options.l2norm
        self.q, self.k, self.v = (x.new_empty(x.shape) for x in (tensors.q, tensors.k, tensors.v))
        self.p = None if tensors.p is None else tensors.p.new_empty(tensors.p.shape)
        self.gates = tensors.v.new_empty(*tensors.beta.shape, len(tensors.gates), dtype=compute_dtype(tensors.q))

    def store(
        self, grad: ChunkGradients, chunk: PreparedChunks, norms: InverseNorms, group: ChunkGroup, scratch: ChunkScratch
    ) -> None:
        gates = [gate for gate in grad.gates if gate is not None]
        group.store(torch.stack(gates, dim=-1), self.gates, 1.0, scratch.gathered)
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
        scratch: ChunkScratch,
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
        gates = zip(given.gates.items(), self.gates.unbind(-1))
        return RuleTensors(
            q=self.q,
            k=self.k,
            v=self.v,
            p=self.p,
            **{name: gradient.to(gate.dtype, copy=True) for (name, gate), gradient in gates},
            initial_state=None if given.initial_state is None else grad_states.to(given.initial_state.dtype),
        )


# ------------------------------------------------------------------------------------------------------------- states


def initial_states(tensors: RuleTensors, boundaries: SequenceBoundaries | None) -> Tensor:
    """[2, N, HV, K, V], a copy of the initial state or zeros."""
    q, v, dtype = tensors.q, tensors.v, compute_dtype(tensors.q)
    if tensors.initial_state is not None:
        return tensors.initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    sequences = v.shape[0] if boundaries is None else boundaries.num_sequences
    return v.new_zeros(2, sequences, v.shape[-2], q.shape[-1], v.shape[-1], dtype=dtype)


def stacked(states: Tensor, slab: Slab) -> Tensor:
    """[2, N, HV, K, V] to the slab's X [n * HV, 2K, V], a copy."""
    chosen = states[:, list(slab.sequences)]
    return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1).contiguous()


def unstack(X: Tensor, states: Tensor, slab: Slab) -> None:
    """Write a slab's X back into [2, N, HV, K, V]."""
    heads, key_dim = states.shape[2:4]
    states[:, list(slab.sequences)] = X.unflatten(0, (-1, heads)).unflatten(2, (2, key_dim)).permute(2, 0, 1, 3, 4)


def members_of(group: ChunkGroup, X_slab: Tensor, heads: int) -> Tensor:
    """The states that the group works on: the slab's own, or a copy of its members'."""
    return X_slab if group.members is None else X_slab.unflatten(0, (-1, heads))[group.members].flatten(0, 1)


def put_members(group: ChunkGroup, X: Tensor, X_slab: Tensor, heads: int) -> None:
    """Write what ``members_of`` gave, and the group has changed, back into the slab's."""
    if group.members is not None:
        X_slab.unflatten(0, (-1, heads))[group.members] = X.unflatten(0, (-1, heads))


def _states_before_groups(chunks: ChunkInputs, slab: Slab, initial: Tensor, residual: Tensor) -> list[Tensor]:
    """X before each group, rebuilt from R."""
    X = stacked(initial, slab)
    starts = []
    for group in slab.groups:
        starts.append(members_of(group, X, chunks.heads))
        if group.members is None and group is not slab.groups[-1]:
            X = _state_after_group(chunks, group, X, residual)
    return starts


def _state_after_group(chunks: ChunkInputs, group: ChunkGroup, X: Tensor, residual: Tensor) -> Tensor:
    """(8) for a whole group without the states between: X_end = to_end X + sum over chunks of rows^T R.

    Only the last rows of the coefficients are needed, multiplied by what the later chunks of the group do to a write.
    """
    heads, scratch = chunks.heads, chunks.scratch(BackwardScratch, group)
    gates, norms = chunks.load_scalars(group, scratch)
    factors, mix = _write_factors(gates, scratch)
    to_end = torch.eye(2, dtype=mix.dtype, device=mix.device).repeat(group.rounds[0][1] * heads, 1, 1)
    for first, end in reversed(group.rounds):
        z = slice(first * heads, end * heads)
        later = to_end[: z.stop - z.start]
        factors[z] = torch.bmm(factors[z], later.mT)
        later.copy_(torch.bmm(later, mix[z]))
    k = group.load(chunks.k, scratch.pq[:, : group.size], norms.k, scratch.gathered)
    rows = spread(k, factors, out=scratch.write)
    group.load(residual, scratch.residual, 1.0, scratch.gathered)

    after, before = X.clone(), X[: len(to_end)]
    torch.bmm(to_end, before.view(len(before), 2, -1), out=after[: len(to_end)].view(len(before), 2, -1))
    for first, end in group.rounds:
        z = slice(first * heads, end * heads)
        after[: z.stop - z.start].baddbmm_(rows[z].mT, scratch.residual[z])
    return after


def _write_factors(gates: GateRows, scratch: ChunkScratch) -> tuple[Tensor, Tensor]:
    """(8): what a write is worth in S and in M at the chunk's end [Z, C, 2], and D [Z, 2, 2]."""
    decay_mu = segment_decay(gates.log_mu, out=scratch.decays[0])  # (3)
    from_here = gates.log_alpha.flip(-1).cumsum(-1).flip(-1)  # sum over l >= j
    after = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], dim=1).exp()  # prod_{l > j} alpha_l
    last_row = torch.bmm((after * gates.beta).unsqueeze(1), decay_mu[:, 1:]).squeeze(1)  # (5) [Z, C+1], without eta
    factors = torch.stack([last_row[:, 1:], -decay_mu[:, -1, 1:]], dim=-1) * gates.eta.unsqueeze(-1)
    if gates.direct is not None:
        factors[..., 0] += after * gates.direct  # (20)
    abar_C, b_C, mbar_C = from_here[:, 0].exp(), last_row[:, 0], decay_mu[:, -1, 0]
    mix = torch.stack([abar_C, -b_C, torch.zeros_like(b_C), mbar_C], dim=-1).view(-1, 2, 2)
    return factors, mix


def _states_before_chunks(
    chunk: PreparedChunks, group: ChunkGroup, start: Tensor, scratch: BackwardScratch, heads: int
) -> Tensor:
    """[Z, 2K, V]: X before every chunk of the group."""
    first, end = group.rounds[0]
    start = start[: (end - first) * heads]
    if len(group.rounds) == 1:
        return start
    X = scratch.X
    X[: len(start)] = start
    for (before, _), (first, end) in zip(group.rounds, group.rounds[1:]):
        # only the sequences that go on have a next chunk
        z = slice(before * heads, (before + end - first) * heads)
        chunk.advance(X[z], scratch.residual[z], z, out=X[first * heads : end * heads])  # (8)
    return X


# --------------------------------------------------------------------------------------------------------------- plan


def plan(tensors: RuleTensors, boundaries: SequenceBoundaries | None, chunk_limit: int) -> tuple[Slab, ...]:
    q, v = tensors.q, tensors.v
    (batch, time, heads, value_dim), key_dim = v.shape, q.shape[-1]
    sequences = Sequences.of(batch, time, boundaries)
    states = max(1, STATE_BYTES_AT_ONCE // (2 * key_dim * value_dim * compute_dtype(q).itemsize))
    size = choose_chunk_size(chunk_limit, sequences.lengths, heads, key_dim, value_dim, states)
    most = min(ROWS_AT_ONCE // size, states) // heads  # chunks of a group
    return plan_slabs(sequences, size, max(1, most), v.device)


@lru_cache(maxsize=16)
def choose_chunk_size(
    limit: int, lengths: tuple[int, ...], heads: int, key_dim: int, value_dim: int, states: int
) -> int:
    """The size up to ``limit`` with the least estimated time: products on whole chunks, passes over states and
    coefficients, and a cost per round. At most ROWS_AT_ONCE rows and ``states`` states are worked on at once.

    Long chunks waste padding and work that grows with C; short ones mean more rounds and more passes over the states.
    A limit of 16 or less asks for accuracy, see `ACCURATE_CHUNK`.
    """
    longest = max(lengths, default=1)
    if limit <= 16:
        return max(1, min(limit, longest, ACCURATE_CHUNK))
    if longest <= 16:
        return longest

    def of_chunk(size: int) -> float:
        products = size * (40 * key_dim * value_dim + size * (12 * value_dim + 16 * key_dim)) / FLOPS_PER_SECOND
        return products + 2 * key_dim * value_dim * SECONDS_PER_STATE_ENTRY + size**2 * SECONDS_PER_MASK_ENTRY

    def seconds(size: int) -> float:
        whole = sum(length // size for length in lengths)
        tails = [length % size for length in lengths if length % size]
        rounds = max(longest // size + 1, (whole + len(tails)) * heads / min(ROWS_AT_ONCE // size, states))
        return heads * (whole * of_chunk(size) + sum(map(of_chunk, tails))) + rounds * SECONDS_PER_ROUND

    sizes = [16 * 2**i for i in range(5) if 16 * 2**i < limit]
    best: int = min([*sizes, limit], key=seconds)
    return min(longest, best)

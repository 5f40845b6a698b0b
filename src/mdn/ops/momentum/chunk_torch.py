"""The ``torch`` backend: the chunk form of ``chunk_math.py`` on batches and packs, forward and backward.

The loops are those of ``passes.py``. Only the inputs and R are kept for the backward pass, which rebuilds the states
from R: first those before each group, then, group by group from the last one, those before each chunk. Numbers in
parentheses: equations of docs/derivation.md. Z = chunks x value heads of a group. Groups are kept small enough for the
caches: larger batches of products are slower on a CPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import ChunkGroup, Sequences, Slab, plan_slabs
from mdn.ops.containment import contain_damage
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
from mdn.ops.momentum.passes import ChunkInputs, InverseNorms, backward_pass, forward_pass
from mdn.ops.momentum.reference import step_
from mdn.ops.momentum.rounds import members_of, stacked
from mdn.ops.momentum.scratch import BackwardScratch, ChunkScratch, ForwardScratch

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
    """(3) to (8)."""

    def compute(given: RuleTensors) -> ForwardResult:
        slabs = plan(given, boundaries, options.chunk_size)
        return forward_pass(ScalarInputs(given, options), slabs, boundaries, save_residual)

    return ForwardResult(*contain_damage(compute, tensors, boundaries))


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    """(9) to (18)."""
    chunks, initial = ScalarInputs(tensors, options), tensors.state_to_update(boundaries)
    slabs = plan(tensors, boundaries, options.chunk_size)
    starts = (_states_before_groups(chunks, slab, initial, residual) for slab in slabs)
    return backward_pass(chunks, slabs, starts, grad_o, grad_final_state, residual, boundaries)


class ScalarInputs(ChunkInputs[PreparedChunks]):
    """One decay per head and token."""

    forward_scratch, backward_scratch = ForwardScratch, BackwardScratch

    def prepare(self, group: ChunkGroup, scratch: ChunkScratch) -> tuple[PreparedChunks, InverseNorms]:
        gates, norms = self.load_scalars(group, scratch)
        k = self.load_vectors(group, norms, scratch)
        return prepare(GateRows(**gates), scratch.pq, k, self.options, scratch), norms

    def gradients(self, chunk: PreparedChunks, X: Tensor, scratch: BackwardScratch) -> ChunkGradients:
        return chunk_gradients(chunk, X, scratch.grad_X, scratch.residual, scratch.grad_target_O, scratch)


def _states_before_groups(chunks: ScalarInputs, slab: Slab, initial: Tensor, residual: Tensor) -> list[Tensor]:
    """X before each group, rebuilt from R."""
    X = stacked(initial, slab)
    starts = []
    for group in slab.groups:
        starts.append(members_of(group, X, chunks.heads))
        if group.members is None and group is not slab.groups[-1]:
            X = _state_after_group(chunks, group, X, residual)
    return starts


def _state_after_group(chunks: ScalarInputs, group: ChunkGroup, X: Tensor, residual: Tensor) -> Tensor:
    """(8) for a whole group without the states between: X_end = to_end X + sum over chunks of rows^T R.

    Only the last rows of the coefficients are needed, multiplied by what the later chunks of the group do to a write.
    """
    heads, scratch = chunks.heads, chunks.scratch(BackwardScratch, group)
    gates, norms = chunks.load_scalars(group, scratch)
    factors, mix = _write_factors(GateRows(**gates), scratch)
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
    """(8): the weight of a write in S and in M at the chunk's end [Z, C, 2], and D [Z, 2, 2]."""
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
    A limit of 16 or less requests accuracy, see `ACCURATE_CHUNK`.
    """
    longest = max(lengths, default=1)
    if limit <= 16:
        return max(1, min(limit, longest, ACCURATE_CHUNK))
    if longest <= 16:
        return max(1, longest)

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

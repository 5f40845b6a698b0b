"""The ``torch`` backend of the rule with a decay for every key dimension: ``vector_math.py`` on batches and packs.

Nothing but the inputs is kept for the backward pass. It runs the forward pass again for R and for the states before
each group of chunks, and then goes through the groups from the last one.
"""

from __future__ import annotations

from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import ChunkGroup, Sequences, Slab, plan_slabs
from mdn.ops.containment import contain_damage
from mdn.ops.momentum.chunk_math import ChunkGradients, GateRows
from mdn.ops.momentum.interface import ACCURATE_CHUNK, ForwardResult, RuleOptions, RuleTensors
from mdn.ops.momentum.passes import ChunkInputs, InverseNorms, backward_pass, forward_pass
from mdn.ops.momentum.reference import step_
from mdn.ops.momentum.scratch import VectorBackwardScratch, VectorForwardScratch, VectorScratch
from mdn.ops.momentum.vector_math import VectorChunks, prepare_vector, vector_gradients

__all__ = ["backward", "forward", "step_"]

ROWS_AT_ONCE = 2048
"""Rows (tokens of a head) worked on at once: more of them fall out of the caches."""
NARROW_STATE = 64 * 64
"""K V up to which chunks of 32 are faster than chunks of 64"""


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    """The residual stays empty: backward needs the inputs only."""

    def compute(given: RuleTensors) -> ForwardResult:
        return forward_pass(VectorInputs(given, options), plan(given, boundaries, options), boundaries, False)

    return ForwardResult(*contain_damage(compute, tensors, boundaries))


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    chunks, slabs = VectorInputs(tensors, options), plan(tensors, boundaries, options)
    starts: list[Tensor] = []
    again = forward_pass(chunks, slabs, boundaries, save_residual=True, starts=starts)
    in_order = iter(starts)
    by_slab = [[next(in_order) for _ in slab.groups] for slab in slabs]
    chunks.keep_levels = True
    return backward_pass(chunks, slabs, by_slab, grad_o, grad_final_state, again.residual, boundaries)


class VectorInputs(ChunkInputs[VectorChunks]):
    """One decay of S, and perhaps of M, per key dimension."""

    forward_scratch, backward_scratch = VectorForwardScratch, VectorBackwardScratch
    keep_levels = False
    """whether chunks keep what their gradients need"""

    def __init__(self, tensors: RuleTensors, options: RuleOptions):
        super().__init__(tensors, options)
        self.channels = {name: gate.to(self.dtype).contiguous() for name, gate in tensors.vector_gates.items()}

    def prepare(self, group: ChunkGroup, scratch: VectorScratch) -> tuple[VectorChunks, InverseNorms]:
        gates, norms = self.load_scalars(group, scratch)
        for (name, x), space in zip(self.channels.items(), scratch.channels):
            gates[name] = group.load(x, space, 1.0, scratch.gathered)
            if group.valid is not None:  # log 1
                gates[name].masked_fill_(~group.valid.repeat_interleave(self.heads, dim=0).unsqueeze(-1), 0.0)
        k = self.load_vectors(group, norms, scratch)
        return prepare_vector(GateRows(**gates), k, self.options, scratch, self.keep_levels), norms

    def gradients(self, chunk: VectorChunks, X: Tensor, scratch: VectorBackwardScratch) -> ChunkGradients:
        return vector_gradients(chunk, X, scratch)


def plan(tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions) -> tuple[Slab, ...]:
    """Chunks are powers of two, not longer than requested."""
    batch, time, heads, _ = tensors.v.shape
    sequences = Sequences.of(batch, time, boundaries)
    narrow = tensors.q.shape[-1] * tensors.v.shape[-1] <= NARROW_STATE
    largest = ACCURATE_CHUNK if options.chunk_size <= 16 else 32 if narrow else 64
    limit = min(options.chunk_size, largest)
    size = 1 << (limit.bit_length() - 1)
    return plan_slabs(sequences, size, max(1, ROWS_AT_ONCE // size // heads), tensors.v.device)

"""The states of the torch backend: their layout, and rebuilding them from R in the backward pass.

Outside [2, N, HV, K, V]; inside a slab (``schedule.py``) stacked per sequence and head, X = [S; M]: [n * HV, 2K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.chunk_io import ChunkReader
from mdn.ops.momentum.schedule import Group, Slab
from mdn.ops.momentum.torch_chunk import Write, write_to_end_of_group


def starting_states(
    initial_state: Tensor | None, q: Tensor, v: Tensor, boundaries: SequenceBoundaries | None, compute: torch.dtype
) -> Tensor:
    """[2, N, HV, K, V], a copy of the initial state or zeros."""
    if initial_state is not None:
        return initial_state.to(compute, copy=True, memory_format=torch.contiguous_format)
    sequences = v.shape[0] if boundaries is None else boundaries.num_sequences
    return v.new_zeros(2, sequences, v.shape[-2], q.shape[-1], v.shape[-1], dtype=compute)


def stacked(states: Tensor, sequences: tuple[int, ...]) -> Tensor:
    """[2, N, HV, K, V] to the slab's [n * HV, 2K, V]."""
    chosen = states[:, list(sequences)]
    return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1).contiguous()


def unstack(state: Tensor, states: Tensor, sequences: tuple[int, ...]) -> None:
    """Write a slab's [n * HV, 2K, V] back into [2, N, HV, K, V]."""
    heads, key_dim = states.shape[2:4]
    states[:, list(sequences)] = state.unflatten(0, (-1, heads)).unflatten(2, (2, key_dim)).permute(2, 0, 1, 3, 4)


def group_start_states(reader: ChunkReader, slab: Slab, start: Tensor, residual: Tensor) -> list[Tensor]:
    """The states that each group begins with, rebuilt from R."""
    state = stacked(start, slab.sequences)
    states = []
    for group in slab.groups:
        states.append(group.states_of(state, reader.heads))
        if group.members is None and group is not slab.groups[-1]:
            state = _end_of_group(reader, group, state, residual)
    return states


def _end_of_group(reader: ChunkReader, group: Group, state: Tensor, residual: Tensor) -> Tensor:
    write_rows, to_end = write_to_end_of_group(reader, group)
    errors = reader.values("errors", residual, group)
    before, end_state = state[: len(to_end)], state.clone()
    torch.bmm(to_end, before.view(len(before), 2, -1), out=end_state[: len(to_end)].view(len(before), 2, -1))
    for first, end in group.rounds:
        z = slice(first * reader.heads, end * reader.heads)
        end_state[: z.stop - z.start].baddbmm_(write_rows[z].mT, errors[z])
    return end_state


def states_of_group(reader: ChunkReader, write: Write, group: Group, group_start: Tensor, errors: Tensor) -> Tensor:
    """[Z, 2K, V]: the state before every chunk of the group."""
    heads = reader.heads
    first, end = group.rounds[0]
    start = group_start[: (end - first) * heads]
    if len(group.rounds) == 1:
        return start
    states = reader.workspace.take("states", len(errors), *start.shape[1:])
    states[: len(start)] = start
    for (before, _), (first, end) in zip(group.rounds, group.rounds[1:]):
        # only the sequences that go on have a next chunk
        z = slice(before * heads, (before + end - first) * heads)
        write.advance(states[z], errors[z], z, out=states[first * heads : end * heads])
    return states

"""How states pass through chunks, whatever the decays are: batches of chunks as affine maps of the stacked states.

A chunk of C tokens maps the state X [2K, V] before it to outputs and to the state after it:

    target = V + read_p X             (I + erase) R = target                            (6)
    O      = read_q X + attend R                                                        (7)
    X'     = D X + write^T R          D: what the chunk does to a state without writes  (8)

Numbers in parentheses: equations of docs/derivation.md. What does not depend on the states is prepared for a whole
group of chunks at once; the states advance round by round (``mdn.ops.chunking``). Z = chunks x value heads of a group.
States are [2, N, HV, K, V] outside and X = [S; M], [sequences x HV, 2K, V], in a slab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.chunking import ChunkGroup, Slab
from mdn.ops.momentum.scratch import BackwardRows, ForwardRows

# ------------------------------------------------------------------------------------------------------------- chunks


def solve_(erase: Tensor, target: Tensor) -> None:
    """``target`` [Z, C, V] becomes R of (6), in place; erase [Z, C, C] is read below the diagonal only.

    By substitution: a product with the inverse loses three digits more where one key repeats and the gates hardly damp,
    because there I + erase is ill-conditioned. Solved from the right, R^T (I + erase)^T = target^T, since LAPACK takes
    matrices column by column: this is how they lie in memory.
    """
    rows = target.mT
    torch.linalg.solve_triangular(erase.mT, rows, upper=True, left=False, unitriangular=True, out=rows)


def solve_transposed_(erase: Tensor, grad_residual: Tensor) -> None:
    """``grad_residual`` [Z, C, V] becomes grad_target of (10), in place."""
    rows = grad_residual.mT
    torch.linalg.solve_triangular(erase, rows, upper=False, left=False, unitriangular=True, out=rows)


class StateStep(NamedTuple):
    """What takes the states over chunks, D = [[abar_C, -b_C], [0, mbar_C]]."""

    write: Tensor
    """[Z, C, 2K]"""
    abar_C: Tensor
    """[Z, 1, 1], or with vector decays [Z, K, 1], as are the next two"""
    b_C: Tensor
    mbar_C: Tensor

    def split(self, sizes: list[int]) -> list[StateStep]:
        """Those of consecutive chunks."""
        return [StateStep(*parts) for parts in zip(*(x.split(sizes) for x in self))]

    def of_first(self, count: int) -> StateStep:
        return self if count == len(self.write) else StateStep(*(x[:count] for x in self))

    def advance(self, X: Tensor, residual: Tensor, out: Tensor) -> None:
        """``out`` = D X + write^T R (8), X [Z, 2K, V]; ``out`` may be X."""
        S, M = X.chunk(2, dim=1)
        next_S, next_M = out.chunk(2, dim=1)
        torch.mul(S, self.abar_C, out=next_S)
        next_S.addcmul_(M, self.b_C, value=-1)
        torch.mul(M, self.mbar_C, out=next_M)
        out.baddbmm_(self.write.mT, residual)

    def retreat(self, grad_X: Tensor, out: Tensor) -> None:
        """``out`` = D^T grad_X', the part of (11) that is carried over; ``out`` may be the gradient itself."""
        grad_S, grad_M = grad_X.chunk(2, dim=1)
        grad_S0, grad_M0 = out.chunk(2, dim=1)
        torch.mul(grad_M, self.mbar_C, out=grad_M0)
        grad_M0.addcmul_(grad_S, self.b_C, value=-1)
        torch.mul(grad_S, self.abar_C, out=grad_S0)


@dataclass
class ChunkMap:
    """A batch of chunks as affine maps of their states."""

    pq: Tensor  # [Z, 2C, K]: rows of p, then rows of q
    k: Tensor  # [Z, C, K]
    read: Tensor  # [Z, 2C, 2K]: read_p, then read_q
    erase: Tensor  # [Z, C, C]: read below the diagonal only
    attend: Tensor  # [Z, C, C]
    step: StateStep


# ------------------------------------------------------------------------------------------------------------- rounds
# Tensors are split into the rounds all at once: slicing them round by round takes longer.


def forward_rounds(
    chunk: ChunkMap, group: ChunkGroup, X: Tensor, scratch: ForwardRows, outputs: bool, heads: int
) -> None:
    """From the values in ``scratch.residual`` to R there and, if needed, O in ``scratch.output``, not yet scaled.
    X [sequences x HV, 2K, V] is advanced in place."""
    sizes = group.round_sizes(heads)
    read_p, read_q = (x.split(sizes) for x in chunk.read.chunk(2, dim=1))
    erase, residual, output = (x.split(sizes) for x in (chunk.erase, scratch.residual, scratch.output))
    for i, step in enumerate(chunk.step.split(sizes)):
        current = X[: sizes[i]]
        residual[i].baddbmm_(read_p[i], current)  # (6): the target
        solve_(erase[i], residual[i])  # (6)
        if outputs:
            torch.bmm(read_q[i], current, out=output[i])  # (7)
        step.advance(current, residual[i], out=current)  # (8)
    if outputs:
        scratch.output.baddbmm_(chunk.attend, scratch.residual)  # (7)


def states_before_chunks(
    chunk: ChunkMap, group: ChunkGroup, start: Tensor, scratch: BackwardRows, heads: int
) -> Tensor:
    """[Z, 2K, V]: X before every chunk of the group, from R; in ``scratch.X`` unless there is one round only."""
    sizes = group.round_sizes(heads)
    start = start[: sizes[0]]
    if len(sizes) == 1:
        return start
    X, residual, steps = scratch.X.split(sizes), scratch.residual.split(sizes), chunk.step.split(sizes)
    X[0].copy_(start)
    for i, count in enumerate(sizes[1:]):  # only the sequences that go on have a next chunk
        steps[i].of_first(count).advance(X[i][:count], residual[i][:count], out=X[i + 1])  # (8)
    return scratch.X


def backward_rounds(chunk: ChunkMap, group: ChunkGroup, grad_X: Tensor, scratch: BackwardRows, heads: int) -> None:
    """Rounds in reverse: only what must be sequential, (9) to (11).

    ``scratch.grad_target_O`` comes with grad_O in its lower half and gets grad_target in its upper one;
    ``scratch.grad_X`` gets the gradients of the states after every chunk; ``grad_X`` [sequences x HV, 2K, V] is moved
    to before the group.
    """
    sizes, of_target = group.round_sizes(heads), slice(group.size)
    torch.bmm(chunk.attend.mT, scratch.grad_target_O[:, group.size :], out=scratch.grad_residual)  # (9)
    erase, read, steps = chunk.erase.split(sizes), chunk.read.split(sizes), chunk.step.split(sizes)
    grad_residual, grad_target_O = scratch.grad_residual.split(sizes), scratch.grad_target_O.split(sizes)
    after = scratch.grad_X.split(sizes)
    arrived = 0  # rows of the state that a later round has passed on
    for i in reversed(range(len(sizes))):
        after[i][arrived:] = grad_X[arrived : sizes[i]]
        grad_residual[i].baddbmm_(steps[i].write, after[i])  # (9)
        solve_transposed_(erase[i], grad_residual[i])  # (10)
        grad_target_O[i][:, of_target] = grad_residual[i]
        before = (after[i - 1] if i else grad_X)[: sizes[i]]
        steps[i].retreat(after[i], out=before)  # (11)
        before.baddbmm_(read[i].mT, grad_target_O[i])  # (11)
        arrived = sizes[i]


# ------------------------------------------------------------------------------------------------------------- states


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

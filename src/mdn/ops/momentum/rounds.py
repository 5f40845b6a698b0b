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

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import ChunkGroup, Slab
from mdn.ops.containment import at_the_end, damage_of, looks_damaged, repaired
from mdn.ops.momentum.interface import ForwardResult, RuleTensors

# ------------------------------------------------------------------------------------------------------------- chunks


class UnitTriangle(NamedTuple):
    """I + erase, solved by halves."""

    below: Tensor
    """[Z, C - C/2, C/2]: erase in the second half of the rows and the first half of the columns"""
    inverse_first: Tensor
    """[Z, C/2, C/2]: inverse of I + erase in the first half of the rows and columns"""
    inverse_second: Tensor
    """the same for the second half"""
    halves: Tensor
    """[3, Z, C - C/2, V]: scratch memory"""

    @classmethod
    def of(cls, erase: Tensor, halves: Tensor) -> UnitTriangle:
        """From erase [Z, C, C], read below the diagonal only."""
        half = erase.shape[-1] // 2
        first, second = (_unit_lower_inverse(erase[:, x, x]) for x in (slice(half), slice(half, None)))
        return cls(erase[:, half:, :half], first, second, halves)

    def solve(self, target: Tensor, z: slice, out: Tensor) -> None:
        """``out`` = R of the chunks z, from target [z, C, V] (6): the first half, then the second."""
        half = self.below.shape[-1]
        first, rest, second = self._halves_of(len(target), half, len(target[0]) - half, len(target[0]) - half)
        torch.bmm(self.inverse_first[z], target[:, :half], out=first)
        torch.baddbmm(target[:, half:], self.below[z], first, alpha=-1, out=rest)
        torch.bmm(self.inverse_second[z], rest, out=second)
        torch.cat([first, second], dim=1, out=out)

    def solve_transposed(self, grad_residual: Tensor, z: slice, out: Tensor) -> None:
        """``out`` = grad_target of the chunks z (10)."""
        half = self.below.shape[-1]
        first, rest, second = self._halves_of(len(out), half, half, len(grad_residual[0]) - half)
        torch.bmm(self.inverse_second[z].mT, grad_residual[:, half:], out=second)
        torch.baddbmm(grad_residual[:, :half], self.below[z].mT, second, alpha=-1, out=rest)
        torch.bmm(self.inverse_first[z].mT, rest, out=first)
        torch.cat([first, second], dim=1, out=out)

    def _halves_of(self, chunks: int, *rows: int) -> list[Tensor]:
        """Scratch memory [chunks, rows, V] for three halves: a round allocates nothing for them."""
        return [half[:chunks, :count] for half, count in zip(self.halves, rows)]


def _unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """(I + A)^-1 of A [Z, n, n].

    One product with the inverse of a whole chunk is slower than substitution by halves, and it loses three digits more
    where one key repeats and the gates hardly damp: there I + erase is ill-conditioned.
    """
    identity = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype, device=strictly_lower.device)
    identity = identity.expand_as(strictly_lower)
    inverse: Tensor = torch.linalg.solve_triangular(strictly_lower, identity, upper=False, unitriangular=True)
    return inverse


@dataclass
class ChunkMap:
    """A batch of chunks as affine maps of their states."""

    pq: Tensor  # [Z, 2C, K]: rows of p, then rows of q
    k: Tensor  # [Z, C, K]
    read: Tensor  # [Z, 2C, 2K]: read_p, then read_q
    write: Tensor  # [Z, C, 2K]
    attend: Tensor  # [Z, C, C]
    triangle: UnitTriangle
    abar_C: Tensor  # [Z, 1, 1], or with vector decays [Z, K, 1], as are the next two: D = [[abar_C, -b_C], [0, mbar_C]]
    b_C: Tensor
    mbar_C: Tensor

    def advance(self, X: Tensor, residual: Tensor, z: slice, out: Tensor) -> None:
        """``out`` = D X + write^T R for the chunks z (8), X [z, 2K, V]; ``out`` may be X."""
        S, M = X.chunk(2, dim=1)
        next_S, next_M = out.chunk(2, dim=1)
        torch.mul(S, self.abar_C[z], out=next_S)
        next_S.addcmul_(M, self.b_C[z], value=-1)
        torch.mul(M, self.mbar_C[z], out=next_M)
        out.baddbmm_(self.write[z].mT, residual)

    def retreat(self, grad_X: Tensor, z: slice, out: Tensor) -> None:
        """``out`` = D^T grad_X', the part of (11) that is carried over; ``out`` may be the gradient itself."""
        grad_S, grad_M = grad_X.chunk(2, dim=1)
        grad_S0, grad_M0 = out.chunk(2, dim=1)
        torch.mul(grad_M, self.mbar_C[z], out=grad_M0)
        grad_M0.addcmul_(grad_S, self.b_C[z], value=-1)
        torch.mul(grad_S, self.abar_C[z], out=grad_S0)


# ------------------------------------------------------------------------------------------------------------- rounds


def forward_rounds(
    chunk: ChunkMap, group: ChunkGroup, X: Tensor, target: Tensor, residual: Tensor, output: Tensor | None, heads: int
) -> None:
    """From the values in ``target`` to outputs (not yet scaled) and R, all [Z, C, V]; X is advanced in place.

    ``output`` None: only R and X.
    """
    size = group.size
    for first, end in group.rounds:
        z = slice(first * heads, end * heads)
        current = X[: z.stop - z.start]
        target[z].baddbmm_(chunk.read[z, :size], current)  # (6)
        chunk.triangle.solve(target[z], z, out=residual[z])  # (6)
        if output is not None:
            torch.bmm(chunk.read[z, size:], current, out=output[z])  # (7)
        chunk.advance(current, residual[z], z, out=current)  # (8)
    if output is not None:
        output.baddbmm_(chunk.attend, residual)  # (7)


def states_before_chunks(
    chunk: ChunkMap, group: ChunkGroup, start: Tensor, residual: Tensor, out: Tensor, heads: int
) -> Tensor:
    """[Z, 2K, V]: X before every chunk of the group, in ``out`` unless there is one round only."""
    first, end = group.rounds[0]
    start = start[: (end - first) * heads]
    if len(group.rounds) == 1:
        return start
    out[: len(start)] = start
    for (before, _), (first, end) in zip(group.rounds, group.rounds[1:]):
        # only the sequences that go on have a next chunk
        z = slice(before * heads, (before + end - first) * heads)
        chunk.advance(out[z], residual[z], z, out=out[first * heads : end * heads])  # (8)
    return out


def backward_rounds(
    chunk: ChunkMap,
    group: ChunkGroup,
    grad_X: Tensor,
    grad_target_O: Tensor,
    grad_residual: Tensor,
    grad_after: Tensor,
    heads: int,
) -> None:
    """Rounds in reverse: only what must be sequential, (9) to (11).

    ``grad_target_O`` [Z, 2C, V] comes with grad_O in its lower half and gets grad_target in its upper one: one product
    then serves both. Fills ``grad_residual`` [Z, C, V] and ``grad_after`` [Z, 2K, V], the gradient of the state after
    every chunk, and moves ``grad_X`` to before the group.
    """
    size = group.size
    torch.bmm(chunk.attend.mT, grad_target_O[:, size:], out=grad_residual)  # (9)
    arrived = 0  # rows of the state that a later round has passed on
    for number, (first, end) in reversed(list(enumerate(group.rounds))):
        z = slice(first * heads, end * heads)
        count = z.stop - z.start
        current = grad_after[z]
        current[arrived:] = grad_X[arrived:count]
        grad_residual[z].baddbmm_(chunk.write[z], current)  # (9)
        chunk.triangle.solve_transposed(grad_residual[z], z, out=grad_target_O[z, :size])  # (10)
        previous = grad_after[group.rounds[number - 1][0] * heads :] if number else grad_X
        chunk.retreat(current, z, out=previous[:count])  # (11)
        previous[:count].baddbmm_(chunk.read[z].mT, grad_target_O[z])  # (11)
        arrived = count


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


def contain_damage(
    compute: Callable[[RuleTensors], ForwardResult], tensors: RuleTensors, boundaries: SequenceBoundaries | None
) -> ForwardResult:
    """``compute`` once, or once more without damaged numbers: a token that is not finite damages itself and later ones,
    no earlier ones (mdn.ops.containment)."""
    result = compute(tensors)
    if not looks_damaged(result.o if result.o.numel() else result.final_state):
        return result
    damage = damage_of(tensors.v, (tensors.k, tensors.p), boundaries)
    if not bool(damage.isnan().any()):
        return result  # the rule itself has diverged, or q was damaged, which concerns its own token only
    p = None if tensors.p is None else repaired(tensors.p)
    o, final_state, residual = compute(tensors._replace(k=repaired(tensors.k), v=repaired(tensors.v), p=p))
    final_state = final_state + at_the_end(damage, boundaries).unsqueeze(-2)
    o, residual = (x + damage if x.numel() else x for x in (o, residual))
    return ForwardResult(o, final_state, residual)

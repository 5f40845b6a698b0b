"""The chunk form with a decay for every key dimension, and its adjoint, for a batch of chunks.

Numbers in parentheses: equations of docs/derivation.md. Z = chunks x value heads, C tokens, P = C rounded up to a power
of two. Every key dimension carries its row of (S, M), and a token without a write moves it by a triangular step (26):

    S <- abar S - b M,    M <- mbar M        of one token: abar = alpha, b = beta mu, mbar = mu

A token writes k r^T with the column (beta eta + direct, -eta), and reads with a row: q after its own step, p before it.
Two neighbouring runs of tokens become one, with the border between them as the anchor (27):

    scores of 2 with 1   read_S write_S^T + read_M write_M^T                         one product of length 2K
    reads of 2           (read_S, read_M)   <- (abar_1 read_S, mbar_1 read_M - b_1 read_S)      from the start of 1
    writes of 1          (write_S, write_M) <- (abar_2 write_S - b_2 write_M, mbar_2 write_M)   to the end of 2
    the step             (abar, b, mbar)    <- (abar_2 abar_1, abar_2 b_1 + b_2 mbar_1, mbar_2 mbar_1)

After log2(C) levels the same arrays are the chunk's map (28). Coefficients are sums of products of gates that all have
the same sign: nothing is divided, no exponent but that of one token's log is taken, and a gate of zero is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.momentum.chunk_math import ChunkGradients, GateRows
from mdn.ops.momentum.interface import RuleOptions
from mdn.ops.momentum.rounds import ChunkMap, StateStep
from mdn.ops.momentum.scratch import VectorBackwardScratch, VectorScratch
from mdn.ops.pairwise import Pairs, levels

# -------------------------------------------------------------------------------------------------------------- steps


class Steps(NamedTuple):
    """What runs of tokens do to S and M: S <- abar S - b M, M <- mbar M; or the gradients of these."""

    abar: Tensor  # [Z, runs, K], as are all
    b: Tensor
    mbar: Tensor

    def in_pairs(self) -> tuple[Steps, Steps]:
        """The earlier and the later run of every pair, [Z, pairs, K]."""
        return Steps(*(x[:, 0::2] for x in self)), Steps(*(x[:, 1::2] for x in self))

    def before(self, later: Steps) -> Steps:
        """Both runs as one (27)."""
        b = torch.addcmul(later.abar * self.b, later.b, self.mbar)
        return Steps(later.abar * self.abar, b, later.mbar * self.mbar)

    def rows(self) -> Steps:
        """For the rows of each run, [Z, runs, 1, K]."""
        return Steps(*(x.unsqueeze(2) for x in self))

    def carry_reads_(self, late: Tensor) -> None:
        """Reads [Z, pairs, n, 2K] from the end of this run to its start, in place (27)."""
        (abar, b, mbar), (read_S, read_M) = self.rows(), late.chunk(2, -1)
        read_M.mul_(mbar).addcmul_(read_S, b, value=-1)
        read_S.mul_(abar)

    def carry_writes_(self, early: Tensor) -> None:
        """Writes [Z, pairs, n, 2K] from the start of this run to its end, in place (27)."""
        (abar, b, mbar), (write_S, write_M) = self.rows(), early.chunk(2, -1)
        write_S.mul_(abar).addcmul_(write_M, b, value=-1)
        write_M.mul_(mbar)


# ------------------------------------------------------------------------------------------------------------- merging


class Merge(NamedTuple):
    """One level, as it was before merging."""

    pairs: Pairs
    first: Steps  # [Z, pairs, K]: of the earlier runs
    second: Steps
    late: Tensor  # [Z, pairs, 2 block, 2K]: reads of the later runs
    early: Tensor  # [Z, pairs, block, 2K]: writes of the earlier runs


def merge_runs_(read: Tensor, write: Tensor, steps: Steps, scores: Tensor, keep: bool) -> tuple[Steps, list[Merge]]:
    """read [Z, P, 2, 2K] and write [Z, P, 2K] become those of the whole chunk, scores [Z, P, 2, P] are filled below the
    diagonal. Returns the chunk's step [Z, 1, K] and, if they are to be kept, all levels."""
    rows, table, kept = read.flatten(1, 2), scores.zero_().flatten(1, 2), []
    for pairs in levels(write.shape[1]):
        first, second = steps.in_pairs()
        late, early = pairs.later(rows, 2), pairs.earlier(write)
        if keep:
            kept.append(Merge(pairs, first, second, late.clone(), early.clone()))
        met = torch.bmm(late.flatten(0, 1), early.flatten(0, 1).mT)  # (27)
        pairs.between(table, 2).copy_(met.unflatten(0, late.shape[:2]))
        first.carry_reads_(late)
        second.carry_writes_(early)
        steps = first.before(second)
    return steps, kept


def merge_adjoint_(
    kept: list[Merge],
    grad_read: Tensor,  # [Z, P, 2, 2K]: of the chunk's; becomes that of the tokens'
    grad_write: Tensor,  # [Z, P, 2K]: the same
    grad_scores: Tensor,  # [Z, P, 2, P]
    grad_steps: Steps,  # [Z, 1, K]
) -> Steps:
    """The same levels downwards (29); returns the gradients of the tokens' steps [Z, P, K]."""
    rows, table = grad_read.flatten(1, 2), grad_scores.flatten(1, 2)
    for pairs, first, second, late, early in reversed(kept):
        grad_late, grad_early = pairs.later(rows, 2), pairs.earlier(grad_write)
        grad_first, grad_second = _join_adjoint(first, second, grad_steps)
        # The sums in the gradients of (abar_1, b_1, mbar_1) and (abar_2, b_2, mbar_2).
        _add_products_(grad_first, late, grad_late, of_reads=True)
        _add_products_(grad_second, early, grad_early, of_reads=False)
        # The transposed step carries gradients of reads as the step carries writes, and the other way round.
        first.carry_writes_(grad_late)
        second.carry_reads_(grad_early)
        # grad_scores write and grad_scores^T read.
        grad_met = pairs.between(table, 2).flatten(0, 1)
        grad_late += torch.bmm(grad_met, early.flatten(0, 1)).view(late.shape)
        grad_early += torch.bmm(grad_met.mT, late.flatten(0, 1)).view(early.shape)
        grad_steps = Steps(*(torch.stack(both, 2).flatten(1, 2) for both in zip(grad_first, grad_second)))
    return grad_steps


def _join_adjoint(first: Steps, second: Steps, grad: Steps) -> tuple[Steps, Steps]:
    """(29): the terms of the steps of both runs that come from the step of the joined run."""
    grad_first = Steps(
        second.abar * grad.abar,
        second.abar * grad.b,
        torch.addcmul(second.b * grad.b, second.mbar, grad.mbar),
    )
    grad_second = Steps(
        torch.addcmul(first.abar * grad.abar, first.b, grad.b),
        first.mbar * grad.b,
        first.mbar * grad.mbar,
    )
    return grad_first, grad_second


def _add_products_(grad: Steps, x: Tensor, grad_carried: Tensor, of_reads: bool) -> None:
    """Add the gradients of a step that has carried x [Z, pairs, n, 2K]; b takes reads from S to M, writes from M to
    S."""
    same_S, same_M = (x * grad_carried).sum(2).chunk(2, -1)
    (x_S, x_M), (grad_S, grad_M) = x.chunk(2, -1), grad_carried.chunk(2, -1)
    grad.abar.add_(same_S)
    grad.mbar.add_(same_M)
    grad.b.sub_((x_S * grad_M if of_reads else x_M * grad_S).sum(2))


# ------------------------------------------------------------------------------------------------------------- chunks


@dataclass
class VectorChunks(ChunkMap):
    """All of a chunk that does not depend on the states."""

    gates: TokenGates
    p_is_k: bool
    kept: list[Merge]  # the levels of merging, if gradients are to follow


class TokenGates(NamedTuple):
    """Gates as factors of rows."""

    alpha: Tensor  # [Z, C, K]
    mu: Tensor  # [Z, C, K], or [Z, C, 1] if it is one number per head
    beta: Tensor  # [Z, C, 1], as are the next two
    eta: Tensor
    at_once: Tensor  # beta eta + direct: the weight in S that a write has at its own token
    mu_has_channels: bool
    probe: str  # what p is multiplied by: "one", "alpha", or with look-ahead "step" (like q)

    @classmethod
    def of(cls, gates: GateRows, options: RuleOptions) -> TokenGates:
        alpha, mu = gates.log_alpha.exp(), gates.log_mu.exp()
        has_channels = mu.dim() == alpha.dim()
        beta, eta = gates.beta.unsqueeze(-1), gates.eta.unsqueeze(-1)
        at_once = beta * eta if gates.direct is None else torch.addcmul(gates.direct.unsqueeze(-1), beta, eta)
        probe = "step" if options.lookahead else "alpha" if options.p_times_alpha else "one"
        return cls(alpha, mu if has_channels else mu.unsqueeze(-1), beta, eta, at_once, has_channels, probe)


def prepare_vector(
    gates: GateRows, k: Tensor | None, options: RuleOptions, scratch: VectorScratch, keep: bool
) -> VectorChunks:
    """From gates and normalised vectors, scratch.pq [Z, 2C, K] and k [Z, C, K]; k None means that p is k."""
    pq, read = scratch.pq, scratch.read
    size, p_is_k = pq.shape[1] // 2, k is None
    k = pq[:, :size] if k is None else k
    of_tokens = TokenGates.of(gates, options)
    steps = _leaves(of_tokens, pq, k, scratch)
    step, kept = merge_runs_(scratch.leaves_read, scratch.leaves_write, steps, scratch.scores, keep)

    read[:, :size], read[:, size:] = scratch.leaves_read[:, :size].unbind(2)
    minus_erase, attend = scratch.scores[:, :size, :, :size].unbind(2)
    own = (pq[:, size:] * k).sum(-1) * of_tokens.at_once.squeeze(-1)
    attend.diagonal(dim1=-2, dim2=-1).copy_(own)  # (28): a query reads its own token's write at once
    return VectorChunks(
        pq=pq,
        k=k,
        read=read,
        erase=minus_erase.neg(),
        attend=attend,
        gates=of_tokens,
        p_is_k=p_is_k,
        step=StateStep(scratch.leaves_write[:, :size], step.abar.mT, step.b.mT, step.mbar.mT),
        kept=kept,
    )


def _leaves(gates: TokenGates, pq: Tensor, k: Tensor, scratch: VectorScratch) -> Steps:
    """Fills reads and writes of single tokens (26), rows of p with a minus sign; returns their steps. What C lacks to a
    power of two does nothing."""
    size, missing = k.shape[1], scratch.leaves_write.shape[1] - k.shape[1]
    read, write = scratch.leaves_read, scratch.leaves_write
    read[:, size:], write[:, size:] = 0.0, 0.0
    p, q = pq[:, :size], pq[:, size:]
    (probe_S, query_S), (probe_M, query_M) = (x.unbind(2) for x in read[:, :size].chunk(2, -1))
    b = gates.beta * gates.mu
    torch.mul(q, gates.alpha, out=query_S)
    torch.mul(q, -b, out=query_M)
    torch.mul(p, -1.0 if gates.probe == "one" else -gates.alpha, out=probe_S)
    if gates.probe == "step":
        torch.mul(p, b, out=probe_M)
    else:
        probe_M.zero_()
    write_S, write_M = write[:, :size].chunk(2, -1)
    torch.mul(k, gates.at_once, out=write_S)
    torch.mul(k, -gates.eta, out=write_M)

    def padded(x: Tensor, neutral: float) -> Tensor:
        return F.pad(x.expand_as(gates.alpha), (0, 0, 0, missing), value=neutral)

    return Steps(padded(gates.alpha, 1.0), padded(b, 0.0), padded(gates.mu, 1.0))


# ------------------------------------------------------------------------------------------------------------- adjoint


def vector_gradients(chunk: VectorChunks, X: Tensor, scratch: VectorBackwardScratch) -> ChunkGradients:
    """From X and grad_X [Z, 2K, V] before and after each chunk, R [Z, C, V] and grad_target_O [Z, 2C, V]."""
    size, grad_X, grad_target_O = chunk.k.shape[1], scratch.grad_X, scratch.grad_target_O
    _interleave(torch.bmm(grad_target_O, X.mT), out=scratch.grad_read)
    scratch.grad_write[:, :size] = torch.bmm(scratch.residual, grad_X.mT)
    scratch.grad_write[:, size:] = 0.0
    grad_table = torch.bmm(grad_target_O, scratch.residual.mT)  # (12): -grad_erase, grad_attend
    grad_own = grad_table[:, size:].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    _interleave(F.pad(grad_table, (0, scratch.scores.shape[-1] - size)), out=scratch.grad_scores)
    (S, M), (grad_S, grad_M) = X.chunk(2, 1), grad_X.chunk(2, 1)
    of_chunk = Steps((S * grad_S).sum(-1), -(M * grad_S).sum(-1), (M * grad_M).sum(-1))  # by X' = step X of (28)
    grad_steps = merge_adjoint_(
        chunk.kept,
        scratch.grad_read,
        scratch.grad_write,
        scratch.grad_scores,
        Steps(*(x.unsqueeze(1) for x in of_chunk)),
    )
    return _leaf_gradients(chunk, grad_own, Steps(*(x[:, :size] for x in grad_steps)), scratch)


def _interleave(rows: Tensor, out: Tensor) -> None:
    """[Z, 2C, D], rows of p first, to [Z, P, 2, D], zeros behind C."""
    size = rows.shape[1] // 2
    out[:, :size] = rows.unflatten(1, (2, size)).transpose(1, 2)
    out[:, size:] = 0.0


def _leaf_gradients(
    chunk: VectorChunks, grad_own: Tensor, grad_steps: Steps, scratch: VectorBackwardScratch
) -> ChunkGradients:
    """(26), backwards: from the gradients of what single tokens read, write and do to those of vectors and gates."""
    gates, k, size = chunk.gates, chunk.k, chunk.k.shape[1]
    p, q = chunk.pq[:, :size], chunk.pq[:, size:]
    alpha, mu, beta, eta, at_once, mu_has_channels, probe = gates
    b = beta * mu
    (grad_probe_S, grad_query_S), (grad_probe_M, grad_query_M) = (
        x.unbind(2) for x in scratch.grad_read[:, :size].chunk(2, -1)
    )
    grad_write_S, grad_write_M = scratch.grad_write[:, :size].chunk(2, -1)

    own = grad_own * at_once  # of q . k on the diagonal of scores_q (28)
    grad_q = torch.addcmul(alpha * grad_query_S, grad_query_M, b, value=-1).addcmul_(k, own)  # q reads (alpha q, -b q)
    grad_k = torch.addcmul(at_once * grad_write_S, grad_write_M, eta, value=-1).addcmul_(q, own)  # (at_once k, -eta k)
    grad_alpha = torch.addcmul(grad_steps.abar, q, grad_query_S)
    grad_b = torch.addcmul(grad_steps.b, q, grad_query_M, value=-1)
    if probe == "one":  # p reads (-p, 0); with alpha (-alpha p, 0); with look-ahead (-alpha p, b p)
        grad_p = -grad_probe_S
    else:
        grad_p = -alpha * grad_probe_S
        grad_alpha.addcmul_(p, grad_probe_S, value=-1)
    if probe == "step":
        grad_p.addcmul_(grad_probe_M, b)
        grad_b.addcmul_(p, grad_probe_M)

    grad_at_once = (k * torch.addcmul(grad_write_S, q, grad_own)).sum(-1)
    grad_mu = torch.addcmul(grad_steps.mbar, grad_b, beta)
    grad_log_mu = grad_mu.mul_(mu) if mu_has_channels else grad_mu.sum(-1) * mu.squeeze(-1)
    grad_gates = GateRows(
        log_alpha=grad_alpha.mul_(alpha),
        log_mu=grad_log_mu,
        beta=torch.addcmul((grad_b * mu).sum(-1), grad_at_once, eta.squeeze(-1)),
        eta=torch.addcmul(-(k * grad_write_M).sum(-1), grad_at_once, beta.squeeze(-1)),
        direct=grad_at_once,
    )
    if chunk.p_is_k:
        grad_k.add_(grad_p)
    along_q, along_k, along_p = ((x * grad).sum(-1) for x, grad in ((q, grad_q), (k, grad_k), (p, grad_p)))
    return ChunkGradients(grad_q, grad_k, None if chunk.p_is_k else grad_p, along_q, along_k, along_p, grad_gates)

"""The part of the exact chunkwise form that does not depend on the state: what a chunk reads, mixes and writes.

The two states are stacked as X = [S; M], 2K x V, so that one chunk is four matrix products:

    W  = V + read_P X            read_P = [-abar_prev P,  b_prev P]                  C x 2K
    R  = (I + A)^-1 W            A = (P K^T) * gamma_prev, strictly lower            C x C
    O  = read_Q X + attend R     read_Q = [abar Q, -b Q], attend = (Q K^T) * gamma
    X' = D X + write^T R         write = [gamma_C K, -written_C K], D mixes S and M by three scalars

The rows of P, Q and K are the vectors as they came, normalised; eta is in gamma and in written (``coefficients.py``),
and alpha multiplies the coefficients of P when the rule asks for it: a pass over C x C or less instead of C x K.

Z = chunks of a group (``schedule.py``) x value heads. Large tensors live in the reader's workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdn.ops.momentum.chunk_io import ChunkReader, Gates, InverseNorms
from mdn.ops.momentum.coefficients import Coefficients, momentum_coefficients, segment_decay
from mdn.ops.momentum.schedule import Group


@dataclass
class Chunk:
    """Everything about a group's chunks that does not depend on the state."""

    gates: Gates
    norms: InverseNorms
    coefficients: Coefficients
    alpha: Tensor | None  # [Z, C, 1]: what multiplies p; None for one
    key: Tensor  # [Z, C, K], normalised like the next; the probes themselves when p is not given
    probe_query: Tensor  # [Z, 2C, K]: rows of p, then rows of q
    scores: Tensor  # [Z, 2C, C]: probe_query key^T
    attend: Tensor  # [Z, C, C]: (q key^T) * gamma
    inverse: Tensor  # [Z, C, C]: (I + A)^-1
    read: Tensor  # [Z, 2C, 2K]: read_P, then read_Q
    write: Write


@dataclass
class Write:
    """The part of a chunk that advances the state."""

    rows: Tensor  # [Z, C, 2K]
    keep_fast_weight: Tensor  # [Z, 1, 1]: abar_C, as are the next two b_C and mbar_C
    leak_momentum: Tensor
    keep_momentum: Tensor

    def advance(self, state: Tensor, errors: Tensor, chunks: slice, out: Tensor) -> None:
        """``out`` = D X + write^T R for one round, X [z, 2K, V]; ``out`` may be the state itself."""
        fast_weight, momentum = state.chunk(2, dim=1)
        next_fast_weight, next_momentum = out.chunk(2, dim=1)
        torch.mul(fast_weight, self.keep_fast_weight[chunks], out=next_fast_weight)
        next_fast_weight.addcmul_(momentum, self.leak_momentum[chunks], value=-1)
        torch.mul(momentum, self.keep_momentum[chunks], out=next_momentum)
        out.baddbmm_(self.rows[chunks].mT, errors)

    def retreat(self, grad_state: Tensor, chunks: slice, out: Tensor) -> None:
        """``out`` = D^T applied to the gradient of X'; ``out`` may be the gradient itself."""
        grad_fast_weight, grad_momentum = grad_state.chunk(2, dim=1)
        before_fast_weight, before_momentum = out.chunk(2, dim=1)
        torch.mul(grad_momentum, self.keep_momentum[chunks], out=before_momentum)
        before_momentum.addcmul_(grad_fast_weight, self.leak_momentum[chunks], value=-1)
        torch.mul(grad_fast_weight, self.keep_fast_weight[chunks], out=before_fast_weight)


def prepare(reader: ChunkReader, group: Group) -> Chunk:
    gates, norms = reader.scalars(group)
    (pairs, size), width = gates.eta.shape, reader.k.shape[-1]
    take = reader.workspace.take
    probe_query = take("probe and query", pairs, 2 * size, width)
    reader.load(reader.q, group, probe_query[:, size:], norms.query)
    if reader.p is None:
        key = reader.load(reader.k, group, probe_query[:, :size], norms.key)
    else:
        reader.load(reader.p, group, probe_query[:, :size], norms.probe)
        key = reader.load(reader.k, group, take("key", pairs, size, width), norms.key)
    alpha = gates.log_alpha.exp().unsqueeze(-1) if reader.options.p_times_alpha else None
    coefficients = momentum_coefficients(gates.log_alpha, gates.log_mu, gates.beta, gates.eta, take)
    gamma = coefficients.gamma

    scores = torch.bmm(probe_query, key.mT, out=take("scores", pairs, 2 * size, size))
    mixed = torch.mul(scores[:, :size], gamma[:, :-1, 1:], out=take("mixed", pairs, size, size))
    if alpha is not None:
        mixed.mul_(alpha)
    identity = torch.eye(size, dtype=gamma.dtype, device=gamma.device).expand(pairs, -1, -1)
    inverse = torch.linalg.solve_triangular(mixed, identity, upper=False, unitriangular=True)
    attend = torch.mul(scores[:, size:], gamma[:, 1:, 1:], out=take("attend", pairs, size, size))
    reading = read_coefficients(coefficients, alpha)
    read = spread(probe_query, reading, out=take("read", pairs, 2 * size, 2 * width))
    writing = write_coefficients(coefficients.written, gamma)
    write_rows = spread(key, writing, out=take("write", pairs, size, 2 * width))
    ends = (x[:, -1:, :1] for x in (coefficients.decay_alpha, gamma, coefficients.decay_mu))
    write = Write(write_rows, *ends)
    return Chunk(gates, norms, coefficients, alpha, key, probe_query, scores, attend, inverse, read, write)


def write_to_end_of_group(reader: ChunkReader, group: Group) -> tuple[Tensor, Tensor]:
    """What takes the states from the group's start to its end, X_end = to_end X + sum over chunks of rows^T R.

    Like ``write`` and D of ``prepare``, from the last rows of the coefficients alone, but with what the later chunks
    of the group do to a write: rows [Z, C, 2K] and to_end [sequences * heads, 2, 2].
    """
    gates, norms = reader.scalars(group)
    (pairs, size), width = gates.eta.shape, reader.k.shape[-1]
    take = reader.workspace.take
    decay_mu = segment_decay(gates.log_mu, out=take("decays", pairs, size + 1, size + 1))
    from_here = gates.log_alpha.flip(-1).cumsum(-1).flip(-1)  # sum over l >= j
    after = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], dim=1).exp()  # prod_{l > j} alpha_l
    decay_into_fast_weight = torch.bmm((after * gates.beta).unsqueeze(1), decay_mu[:, 1:])  # [Z, 1, C+1]
    factors = write_coefficients(decay_mu, decay_into_fast_weight) * gates.eta.unsqueeze(-1)
    keep_fast_weight, leak_momentum, keep_momentum = (
        from_here[:, 0].exp(),
        decay_into_fast_weight[:, 0, 0],
        decay_mu[:, -1, 0],
    )
    mix = torch.stack([keep_fast_weight, -leak_momentum, torch.zeros_like(leak_momentum), keep_momentum], dim=-1)
    mix = mix.view(-1, 2, 2)

    to_end = torch.eye(2, dtype=mix.dtype, device=mix.device).repeat(group.rounds[0][1] * reader.heads, 1, 1)
    for first, end in reversed(group.rounds):
        z = slice(first * reader.heads, end * reader.heads)
        later = to_end[: z.stop - z.start]
        factors[z] = torch.bmm(factors[z], later.mT)
        later.copy_(torch.bmm(later, mix[z]))
    key = reader.load(reader.k, group, take("key", pairs, size, width), norms.key)
    return spread(key, factors, out=take("write", pairs, size, 2 * width)), to_end


def read_coefficients(coefficients: Coefficients, alpha: Tensor | None) -> Tensor:
    """[Z, 2C, 2]: what multiplies the rows of P and Q in front of S and of M."""
    starts = torch.stack([coefficients.decay_alpha[..., 0], -coefficients.gamma[..., 0]], dim=-1)  # [Z, C+1, 2]
    before = starts[:, :-1].neg()
    return torch.cat([before if alpha is None else before.mul_(alpha), starts[:, 1:]], dim=1)


def write_coefficients(written: Tensor, gamma: Tensor) -> Tensor:
    """[Z, C, 2]: what a write of the chunk is worth in S and in M at its end. Takes whole matrices or last rows."""
    return torch.stack([gamma[:, -1, 1:], -written[:, -1, 1:]], dim=-1)


def times_gamma_(rows: Tensor, gamma: Tensor) -> Tensor:
    """[Z, 2C, C] times gamma, in place: rows of P see the state before their token, rows of Q the state after it."""
    size = rows.shape[-1]
    rows[:, :size].mul_(gamma[:, :-1, 1:])
    rows[:, size:].mul_(gamma[:, 1:, 1:])
    return rows


def spread(rows: Tensor, factors: Tensor, out: Tensor) -> Tensor:
    """rows [Z, n, K] and factors [Z, n, 2] to [Z, n, 2K]: [rows * factor_0, rows * factor_1]."""
    torch.mul(rows.unsqueeze(2), factors.unsqueeze(-1), out=out.unflatten(2, (2, -1)))
    return out


def along(pairs: Tensor, rows: Tensor, scratch: Tensor) -> Tensor:
    """Inner products of pairs [Z, n, 2, K] with rows [Z, n, K]: the gradient of ``spread``'s factors."""
    return torch.mul(pairs, rows.unsqueeze(2), out=scratch.view(pairs.shape)).sum(-1)


def gather_(rows: Tensor, pairs: Tensor, factors: Tensor) -> None:
    """Add factor-weighted pairs [Z, n, 2, K] to rows [Z, n, K], in place: the gradient of ``spread``'s rows."""
    rows.addcmul_(pairs[:, :, 0], factors[..., :1]).addcmul_(pairs[:, :, 1], factors[..., 1:])

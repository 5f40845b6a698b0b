"""The part of the exact chunkwise form that does not depend on the state: what a chunk reads, mixes and writes.

The two states are stacked as X = [S; M], 2K x V, so that one chunk is four matrix products:

    W  = V + read_P X            read_P = [-abar_prev P,  b_prev P]                C x 2K
    R  = (I + A)^-1 W            A = (P Khat^T) * gamma_prev, strictly lower       C x C
    O  = read_Q X + attend R     read_Q = [abar Q, -b Q], attend = (Q Khat^T) * gamma
    X' = D X + write^T R         write = [gamma_C Khat, -mbar_C/mbar Khat], D mixes S and M by three scalars

Z = chunks of a group (``schedule.py``) x value heads. Large tensors live in the reader's workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdn.ops.momentum_delta_rule.chunk_io import ChunkReader, Gates, Unit
from mdn.ops.momentum_delta_rule.coefficients import momentum_coefficients, segment_decay
from mdn.ops.momentum_delta_rule.schedule import Group


@dataclass
class Chunk:
    """Everything about a group's chunks that does not depend on the state. khat = eta k, phat = alpha p."""

    gates: Gates
    key: Unit
    probe: Unit  # the same object as key when p is not given
    query: Unit
    scaled_key: Tensor  # [Z, C, K]: khat
    probe_query: Tensor  # [Z, 2C, K]: rows of phat, then rows of q
    decay_alpha: Tensor  # [Z, C+1, C+1], as are the next two
    decay_mu: Tensor
    gamma: Tensor
    scores: Tensor  # [Z, 2C, C]: probe_query khat^T
    attend: Tensor  # [Z, C, C]: (q khat^T) * gamma
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
    gates = reader.gates(group)
    key = reader.unit("key", reader.k, group)
    probe = key if reader.p is None else reader.unit("probe", reader.p, group)
    pairs, size, width = key.rows.shape
    take = reader.workspace.take
    probe_query = take("probe and query", pairs, 2 * size, width)
    query = reader.unit("query", reader.q, group, out=probe_query[:, size:])
    if reader.options.p_times_alpha:
        torch.mul(probe.rows, gates.log_alpha.exp().unsqueeze(-1), out=probe_query[:, :size])
    else:
        probe_query[:, :size] = probe.rows
    scaled_key = torch.mul(key.rows, gates.eta.unsqueeze(-1), out=take("scaled key", pairs, size, width))
    decay_alpha, decay_mu, gamma = momentum_coefficients(gates.log_alpha, gates.log_mu, gates.beta)

    scores = torch.bmm(probe_query, scaled_key.mT, out=take("scores", pairs, 2 * size, size))
    mixed = times_gamma(scores, gamma, out=take("mixed", pairs, 2 * size, size))
    identity = torch.eye(size, dtype=gamma.dtype, device=gamma.device).expand(pairs, -1, -1)
    inverse = torch.linalg.solve_triangular(mixed[:, :size], identity, upper=False, unitriangular=True)
    writing, reading = write_coefficients(decay_mu, gamma), read_coefficients(decay_alpha, gamma)
    write_rows = spread(scaled_key, writing, out=take("write", pairs, size, 2 * width))
    ends = (decay_alpha[:, -1:, :1], gamma[:, -1:, :1], decay_mu[:, -1:, :1])
    read = spread(probe_query, reading, out=take("read", pairs, 2 * size, 2 * width))
    return Chunk(
        gates,
        key,
        probe,
        query,
        scaled_key,
        probe_query,
        decay_alpha,
        decay_mu,
        gamma,
        scores,
        mixed[:, size:],
        inverse,
        read,
        Write(write_rows, *ends),
    )


def write_only(reader: ChunkReader, group: Group) -> Write:
    """The part of ``prepare`` that advances the state, from the last rows alone."""
    gates = reader.gates(group)
    decay_mu = segment_decay(gates.log_mu)
    from_here = gates.log_alpha.flip(-1).cumsum(-1).flip(-1)  # sum over l >= j
    after = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], dim=1).exp()  # prod_{l > j} alpha_l
    gamma_last = torch.bmm((after * gates.beta).unsqueeze(1), decay_mu[:, 1:])  # [Z, 1, C+1]
    scaled_key = reader.unit("key", reader.k, group).rows.mul_(gates.eta.unsqueeze(-1))
    pairs, size, width = scaled_key.shape
    out = reader.workspace.take("write", pairs, size, 2 * width)
    rows = spread(scaled_key, write_coefficients(decay_mu, gamma_last), out)
    return Write(rows, from_here[:, :1, None].exp(), gamma_last[:, :, :1], decay_mu[:, -1:, :1])


def times_gamma(rows: Tensor, gamma: Tensor, out: Tensor) -> Tensor:
    """[Z, 2C, C] * gamma: rows of P see the state before their token, rows of Q the state after it."""
    size = rows.shape[-1]
    torch.mul(rows[:, :size], gamma[:, :-1, 1:], out=out[:, :size])
    torch.mul(rows[:, size:], gamma[:, 1:, 1:], out=out[:, size:])
    return out


def read_coefficients(decay_alpha: Tensor, gamma: Tensor) -> Tensor:
    """[Z, 2C, 2]: what multiplies the rows of P and Q in front of S and of M."""
    before = torch.stack([-decay_alpha[:, :-1, 0], gamma[:, :-1, 0]], dim=-1)
    after = torch.stack([decay_alpha[:, 1:, 0], -gamma[:, 1:, 0]], dim=-1)
    return torch.cat([before, after], dim=1)


def write_coefficients(decay_mu: Tensor, gamma: Tensor) -> Tensor:
    """[Z, C, 2]: what a write of the chunk is worth in S and in M at its end. Takes whole matrices or last rows."""
    return torch.stack([gamma[:, -1, 1:], -decay_mu[:, -1, 1:]], dim=-1)


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

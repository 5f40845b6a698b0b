"""The exact chunk form and its adjoint for a batch of chunks. Numbers in parentheses: equations of docs/derivation.md.

Z = chunks x value heads, C tokens. Matrices over 0..C have index 0 for the chunk's start, so that "before token i" is
row i - 1. The states are stacked, X = [S; M], which makes each of (6), (7) and (8) one product:

    target = V + read_p X           read_p = [-abar_prev P,  b_prev P]        [C, 2K]
    O      = read_q X + attend R    read_q = [abar Q, -b Q]                   [C, 2K]
    X'     = D X + write^T R        write  = [write_S K, -write_M K]          [C, 2K];  D mixes S and M by three numbers

Rows of p and q are kept in one tensor ``pq``, rows of p first, and so is everything made of them (``read``, ``pk_qk``).
Here p and k are the L2-normalised vectors without alpha: where the rule probes with alpha p, alpha multiplies the
coefficients of p, a pass over C x C instead of C x K numbers. Entries of gradients above the diagonal are not masked,
because they only ever meet the zeros of ``gamma_S``, ``gamma_M`` and the decays.

With look-ahead (22) the rows of p read the coefficients after their token instead of before it, without the diagonal;
they are ``probe_rows`` of the matrices over 0..C.

Results are written into ``ChunkScratch``; nothing here is differentiated by autograd but ``coefficients_of``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.momentum.interface import RuleOptions
from mdn.ops.momentum.rounds import ChunkMap, StateStep
from mdn.ops.momentum.scratch import BackwardScratch, ChunkScratch

LOG2_E = math.log2(math.e)  # powers of two: torch's exp is 30 times slower where it underflows
LOG_OF_ZERO = -1e4  # its exponential is exactly 0, and unlike -inf it may be multiplied by zero


class GateRows(NamedTuple):
    """The gates of every token, or their gradients."""

    log_alpha: Tensor  # [Z, C], as are all; with channels [Z, C, K], as log_mu may be too
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    direct: Tensor | None = None


# ----------------------------------------------------------------------------------------------- coefficients (3) - (5)


@dataclass
class Coefficients:
    """All but ``gamma_S`` are stored transposed, so that the sums over segments run along memory."""

    decay_alpha: Tensor  # [Z, C+1, C+1], as are all
    decay_mu: Tensor
    gamma_M: Tensor
    scaled: Tensor  # diag(0, beta) gamma_M + diag(0, direct): what each step adds to S
    gamma_S: Tensor


def segment_decay(log_gate: Tensor, out: Tensor | None = None) -> Tensor:
    """[..., C] log gates to [..., C+1, C+1] products over segments (3); ``out`` is memory of that shape.

    Each entry is the exponential of a sum of logs over its own segment (a masked cumulative sum), never of a difference
    of two cumulative sums: a gate of -inf gives exact zeros, a tiny gate does not spoil its neighbours.
    """
    ones = log_gate.new_ones(log_gate.shape[-1] + 1, log_gate.shape[-1] + 1)
    padded = F.pad(log_gate.clamp(min=LOG_OF_ZERO) * LOG2_E, (1, 0)).unsqueeze(-2)
    in_segment = torch.mul(padded, ones.triu(1), out=out)  # row j holds log gate l for every l > j
    return in_segment.cumsum_(-1).add_(ones.tril(-1), alpha=LOG_OF_ZERO).exp2_().mT


def coefficients_of(gates: GateRows, scratch: ChunkScratch | None = None) -> Coefficients:
    """From gates [Z, C]; without scratch memory autograd can follow."""
    decays_out, gamma_M_out, scaled_out, gamma_S_out = (
        (None, None, None, None)
        if scratch is None
        else (scratch.decays, scratch.gamma_M, scratch.scaled, scratch.gamma_S)
    )
    decay_alpha, decay_mu = segment_decay(torch.stack([gates.log_alpha, gates.log_mu]), out=decays_out)  # (3)
    gamma_M = torch.mul(decay_mu.mT, _with_one(gates.eta).mT, out=gamma_M_out).mT  # (4)
    scaled = torch.mul(gamma_M.mT, _with_zero(gates.beta).mT, out=scaled_out).mT
    if gates.direct is not None:
        scaled.diagonal(dim1=-2, dim2=-1)[..., 1:] += gates.direct  # (20)
    gamma_S = torch.bmm(decay_alpha, scaled, out=gamma_S_out)  # (5)
    return Coefficients(decay_alpha, decay_mu, gamma_M, scaled, gamma_S)


def _with_zero(beta: Tensor) -> Tensor:
    """diag(0, beta) as a column [Z, C+1, 1]: no step is taken at index 0."""
    return F.pad(beta, (1, 0)).unsqueeze(-1)


def _with_one(eta: Tensor) -> Tensor:
    """diag(1, eta) as a row [Z, 1, C+1]: what the chunk began with counts in full."""
    return F.pad(eta, (1, 0), value=1.0).unsqueeze(-2)


def coefficients_adjoint(
    grad_abar: Tensor,  # [Z, C+1]: column 0 of grad_decay_alpha
    grad_gamma_M_end: Tensor,  # [Z, C+1]: the last row of grad_gamma_M; no other is read by the chunk form
    grad_gamma_S: Tensor,  # [Z, C+1, C+1]
    of: Coefficients,  # overwritten
    gates: GateRows,
    scratch: BackwardScratch,
) -> GateRows:
    """Gradients of the gates through the coefficients."""
    changes = scratch.changes.mT  # [2, Z, C+1, C+1]: gradients of the decays, then gradients times decays
    change_alpha, change_mu = changes
    torch.bmm(of.scaled, grad_gamma_S.mT, out=change_alpha.mT)  # (16) grad_decay_alpha = grad_gamma_S scaled^T
    change_alpha[..., 0] += grad_abar  # (15)
    change_alpha.mul_(of.decay_alpha)  # (17)

    torch.bmm(grad_gamma_S.mT, of.decay_alpha, out=change_mu.mT)  # (16) grad_scaled = decay_alpha^T grad_gamma_S
    grad_direct = None if gates.direct is None else change_mu.diagonal(dim1=-2, dim2=-1)[:, 1:].clone()  # (21)
    grad_beta = torch.mul(change_mu, of.gamma_M, out=of.scaled).sum(-1)[:, 1:]  # (16)
    change_mu.mul_(_with_zero(gates.beta))  # (16) grad_gamma_M = diag(0, beta) grad_scaled
    change_mu[:, -1] += grad_gamma_M_end  # (13), (15)
    change_mu.mul_(of.decay_mu)  # (16) grad_gamma_M * decay_mu, which serves grad_eta and (17)
    grad_eta = change_mu.sum(-2)[:, 1:]  # (16)
    change_mu.mul_(_with_one(gates.eta))  # (16) grad_decay_mu, here times decay_mu
    grad_log_alpha, grad_log_mu = segment_decay_adjoint(changes)  # (17)
    return GateRows(grad_log_alpha, grad_log_mu, grad_beta, grad_eta, grad_direct)


def segment_decay_adjoint(change: Tensor) -> Tensor:
    """Gradients of the log gates (17) from ``change`` = gradient of a decay * the decay, which is overwritten.

    Log gate l is in every segment that begins before l and ends at l or later.
    """
    begins_before = change.mT.cumsum_(-2)[..., :-1, 1:]  # row l, column i, both from 1: sum over j < l
    return begins_before.mul_(begins_before.new_ones(begins_before.shape[-2:]).triu()).sum(-1)


# ------------------------------------------------------------------------------------- what a chunk does (6), (7), (8)


@dataclass
class PreparedChunks(ChunkMap):
    """All of a chunk that does not depend on the states."""

    gates: GateRows
    coefficients: Coefficients
    alpha: Tensor | None  # [Z, C, 1]: what multiplies p; None for one
    probe_rows: slice  # rows of the coefficients that p reads
    p_is_k: bool
    pk_qk: Tensor  # [Z, 2C, C]: inner products with k
    read_factors: Tensor  # [Z, 2C, 2]: what multiplies the rows of p and q in front of S and of M
    write_factors: Tensor  # [Z, C, 2]: write_S, -write_M


BEFORE_TOKEN, AFTER_TOKEN = slice(0, -1), slice(1, None)  # rows of the matrices over 0..C


def prepare(
    gates: GateRows, pq: Tensor, k: Tensor | None, options: RuleOptions, scratch: ChunkScratch
) -> PreparedChunks:
    """From gates [Z, C] and normalised vectors, pq [Z, 2C, K] and k [Z, C, K]; k None means that p is k."""
    size, p_is_k = pq.shape[1] // 2, k is None
    k = pq[:, :size] if k is None else k
    coefficients = coefficients_of(gates, scratch)
    decay_alpha, gamma_S, gamma_M = coefficients.decay_alpha, coefficients.gamma_S, coefficients.gamma_M
    alpha = gates.log_alpha.exp().unsqueeze(-1) if options.p_times_alpha else None
    probe_rows = AFTER_TOKEN if options.lookahead else BEFORE_TOKEN  # (6), (22)

    pk_qk = torch.bmm(pq, k.mT, out=scratch.pk_qk)
    erase = torch.mul(pk_qk[:, :size], gamma_S[:, probe_rows, 1:], out=scratch.erase)  # (6)
    if alpha is not None:
        erase.mul_(alpha)
    attend = torch.mul(pk_qk[:, size:], gamma_S[:, 1:, 1:], out=scratch.attend)  # (7)

    read_factors = _read_factors(coefficients, alpha, probe_rows)
    write_factors = torch.stack([gamma_S[:, -1, 1:], -gamma_M[:, -1, 1:]], dim=-1)  # (8) write_S, -write_M
    return PreparedChunks(
        gates=gates,
        coefficients=coefficients,
        alpha=alpha,
        probe_rows=probe_rows,
        pq=pq,
        k=k,
        p_is_k=p_is_k,
        pk_qk=pk_qk,
        attend=attend,
        erase=erase,
        read_factors=read_factors,
        read=spread(pq, read_factors, out=scratch.read),
        write_factors=write_factors,
        step=StateStep(
            write=spread(k, write_factors, out=scratch.write),
            abar_C=decay_alpha[:, -1:, :1],
            b_C=gamma_S[:, -1:, :1],
            mbar_C=gamma_M[:, -1:, :1],
        ),
    )


def _read_factors(coefficients: Coefficients, alpha: Tensor | None, probe_rows: slice) -> Tensor:
    """[Z, 2C, 2]: (-abar, b) for p, before each token (6) or after it (22), (abar, -b) after it for q (7)."""
    rows = torch.stack([coefficients.decay_alpha[..., 0], -coefficients.gamma_S[..., 0]], dim=-1)  # [Z, C+1, 2]
    of_p = rows[:, probe_rows].neg()
    return torch.cat([of_p if alpha is None else of_p.mul_(alpha), rows[:, AFTER_TOKEN]], dim=1)


def spread(rows: Tensor, factors: Tensor, out: Tensor) -> Tensor:
    """rows [Z, n, K] and factors [Z, n, 2] to [Z, n, 2K]: [rows * factor_0, rows * factor_1]."""
    torch.mul(rows.unsqueeze(2), factors.unsqueeze(-1), out=out.unflatten(2, (2, -1)))
    return out


# ------------------------------------------------------------------------------------------------ adjoint (12) - (17)


class ChunkGradients(NamedTuple):
    """Gradients of what a chunk was given; those of vectors are of the normalised ones, without alpha."""

    q: Tensor  # [Z, C, K]
    k: Tensor  # [Z, C, K]
    p: Tensor | None  # [Z, C, K]; None when p is k: then its part is in k
    along_q: Tensor  # [Z, C]: <vector, gradient>, which the norm (18) needs
    along_k: Tensor
    along_p: Tensor
    gates: GateRows


def chunk_gradients(
    chunk: PreparedChunks,  # its memory is used up
    X: Tensor,  # [Z, 2K, V]: states before each chunk
    grad_X: Tensor,  # [Z, 2K, V]: gradients of the states after it
    residual: Tensor,  # [Z, C, V]
    grad_target_O: Tensor,  # [Z, 2C, V]: grad_target, then grad_O, as (10) leaves them
    scratch: BackwardScratch,
) -> ChunkGradients:
    size = chunk.k.shape[1]
    # Gradients of read and write, each [.., 2, K]: in front of S and of M. They serve (14) and (15).
    grad_read = torch.bmm(grad_target_O, X.mT, out=scratch.grad_read).unflatten(-1, (2, -1))
    grad_write = torch.bmm(residual, grad_X.mT, out=scratch.grad_write).unflatten(-1, (2, -1))
    grad_read_factors = _inner(grad_read, chunk.pq, scratch=chunk.read)  # (15)
    # (13): r . (k^T grad_S'), r . (k^T grad_M')
    grad_write_factors = _inner(grad_write, chunk.k, scratch=chunk.step.write)

    grad_masked = torch.bmm(grad_target_O, residual.mT, out=scratch.grad_masked)  # (12): -grad_erase, grad_attend
    grad_masked[:, :size].mul_(-1.0 if chunk.alpha is None else -chunk.alpha)
    if chunk.probe_rows == AFTER_TOKEN:
        grad_masked[:, :size].tril_(-1)  # (22): gamma_S has a diagonal there that erase does not have
    grad_gamma_rows = torch.mul(grad_masked, chunk.pk_qk, out=scratch.grad_gamma_rows)  # (13)
    grad_pk_qk = _times_gamma_S_(grad_masked, chunk.coefficients.gamma_S, chunk.probe_rows)  # (13)

    # <vector, gradient> of (14) without a pass over C x K: inner products times their gradients, and (15).
    overlap = chunk.pk_qk.mul_(grad_pk_qk)
    along_pq = overlap.sum(-1) + (chunk.read_factors * grad_read_factors).sum(-1)
    along_k = overlap.sum(-2) + (chunk.write_factors * grad_write_factors).sum(-1)

    grad_ends = _end_gradients(X, grad_X)
    gates = _gate_gradients(chunk, grad_gamma_rows, grad_read_factors, grad_write_factors, grad_ends, scratch)
    along_p = along_pq[:, :size]
    if chunk.alpha is not None:
        gates.log_alpha.add_(along_p)  # (17): p is proportional to alpha
    grad_q, grad_k, grad_p = _vector_gradients(chunk, grad_pk_qk, grad_read, grad_write, scratch)
    if grad_p is None:
        along_k = along_k + along_p
    return ChunkGradients(grad_q, grad_k, grad_p, along_pq[:, size:], along_k, along_p, gates)


def _times_gamma_S_(rows: Tensor, gamma_S: Tensor, probe_rows: slice) -> Tensor:
    """[Z, 2C, C] times the rows of gamma_S that p and q read, in place."""
    size = rows.shape[-1]
    rows[:, :size].mul_(gamma_S[:, probe_rows, 1:])
    rows[:, size:].mul_(gamma_S[:, AFTER_TOKEN, 1:])
    return rows


def _inner(pairs: Tensor, rows: Tensor, scratch: Tensor) -> Tensor:
    """Inner products of pairs [Z, n, 2, K] with rows [Z, n, K]: the gradient of ``spread``'s factors."""
    return torch.mul(pairs, rows.unsqueeze(2), out=scratch.view(pairs.shape)).sum(-1)


def _add_weighted_(rows: Tensor, pairs: Tensor, factors: Tensor) -> None:
    """Add factor-weighted pairs [Z, n, 2, K] to rows [Z, n, K]: the gradient of ``spread``'s rows."""
    rows.addcmul_(pairs[:, :, 0], factors[..., :1]).addcmul_(pairs[:, :, 1], factors[..., 1:])


class EndGradients(NamedTuple):
    """Gradients of what mixes the states at the chunk's end, by (8)."""

    abar_C: Tensor  # [Z], as are all
    b_C: Tensor
    mbar_C: Tensor


def _end_gradients(X: Tensor, grad_X: Tensor) -> EndGradients:
    """The inner products of (15): <S0, grad_S'>, -<M0, grad_S'>, <M0, grad_M'>."""
    after, before = (x.view(len(x), 2, -1) for x in (grad_X, X))  # [Z, 2, K V]: of S, of M
    inner = torch.bmm(after, before.mT)  # [Z, 2, 2]; one pass, many times faster than vecdot
    return EndGradients(inner[:, 0, 0], -inner[:, 0, 1], inner[:, 1, 1])


def _gate_gradients(
    chunk: PreparedChunks,
    grad_gamma_rows: Tensor,  # [Z, 2C, C]: of gamma_S through erase, then through attend
    grad_read_factors: Tensor,  # [Z, 2C, 2]
    grad_write_factors: Tensor,  # [Z, C, 2]
    grad_ends: EndGradients,
    scratch: BackwardScratch,
) -> GateRows:
    """Collects all that reads the coefficients (13, 15), then (16) and (17)."""
    size = chunk.k.shape[1]
    of_p, of_q = grad_read_factors[:, :size], grad_read_factors[:, size:]  # of (-abar, b) and of (abar, -b)
    if chunk.alpha is not None:
        of_p = of_p * chunk.alpha
    grad_starts = F.pad(of_q, (0, 0, 1, 0))  # (15) [Z, C+1, 2]: of abar, of -b
    grad_starts[:, chunk.probe_rows] -= of_p  # (15)
    grad_starts[:, -1, 0] += grad_ends.abar_C  # (15): the terms with [i = C]
    grad_starts[:, -1, 1] -= grad_ends.b_C

    grad_gamma_S = scratch.grad_gamma_S
    torch.neg(grad_starts[..., 1], out=grad_gamma_S[..., 0])  # (15): column 0 is b
    grad_gamma_S[:, 0, 1:] = 0.0
    grad_gamma_S[:, AFTER_TOKEN, 1:] = grad_gamma_rows[:, size:]  # (13)
    grad_gamma_S[:, chunk.probe_rows, 1:] += grad_gamma_rows[:, :size]  # (13)
    grad_gamma_S[:, -1, 1:] += grad_write_factors[..., 0]  # (13)
    grad_gamma_M_end = torch.cat([grad_ends.mbar_C.unsqueeze(-1), -grad_write_factors[..., 1]], dim=-1)  # (13), (15)
    coefficients = chunk.coefficients
    return coefficients_adjoint(grad_starts[..., 0], grad_gamma_M_end, grad_gamma_S, coefficients, chunk.gates, scratch)


def _vector_gradients(
    chunk: PreparedChunks, grad_pk_qk: Tensor, grad_read: Tensor, grad_write: Tensor, scratch: BackwardScratch
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(14): gradients of q, k and p (None when p is k)."""
    size = chunk.k.shape[1]
    of_p, of_q = slice(None, size), slice(size, None)
    grad_q = torch.bmm(grad_pk_qk[:, of_q], chunk.k, out=scratch.grad_q)  # (14) grad_qk K
    _add_weighted_(grad_q, grad_read[:, of_q], chunk.read_factors[:, of_q])  # (14) grad_O S0^T, grad_O M0^T
    grad_p = torch.bmm(grad_pk_qk[:, of_p], chunk.k, out=scratch.grad_p)  # (14) grad_pk K
    _add_weighted_(grad_p, grad_read[:, of_p], chunk.read_factors[:, of_p])  # (14) grad_target S0^T, grad_target M0^T
    if chunk.p_is_k:
        grad_k = grad_p.baddbmm_(grad_pk_qk.mT, chunk.pq)  # (14) grad_qk^T Q + grad_pk^T P, and grad_P as a part of it
    else:
        grad_k = torch.bmm(grad_pk_qk.mT, chunk.pq, out=scratch.grad_k)  # (14) grad_qk^T Q + grad_pk^T P
    _add_weighted_(grad_k, grad_write, chunk.write_factors)  # (14) R grad_S'^T, R grad_M'^T
    return grad_q, grad_k, None if chunk.p_is_k else grad_p

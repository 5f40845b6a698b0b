"""The exact chunkwise momentum delta rule in torch, with a hand-written backward: the ``torch`` backend.

The two states are stacked as X = [S; M], 2K x V, so that one chunk is four matrix products:

    W  = V + read_P X            read_P = [-abar_prev P,  b_prev P]                C x 2K
    R  = (I + A)^-1 W            A = (P Khat^T) * gamma_prev, strictly lower       C x C
    O  = read_Q X + attend R     read_Q = [abar Q, -b Q], attend = (Q Khat^T) * gamma
    X' = D X + write^T R         write = [gamma_C Khat, -mbar_C/mbar Khat], D mixes S and M by three scalars

Only the inputs and R are kept for the backward pass, which rebuilds the chunk-start states from R. Work proceeds in the
rounds and groups of ``schedule.py``. Z = chunks of a group x value heads; X-sized tensors are one round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum_delta_rule.chunk_io import ChunkReader, ChunkWriter
from mdn.ops.momentum_delta_rule.coefficients import momentum_coefficients, momentum_coefficients_adjoint, segment_decay
from mdn.ops.momentum_delta_rule.options import RuleOptions, compute_dtype
from mdn.ops.momentum_delta_rule.schedule import Group, Slab, choose_chunk_size, make_schedule, sequences_of

# (chunk, head) pairs prepared at once; and bytes of chunk-start states held at once in the backward pass.
PAIRS_AT_ONCE = 64
STATE_BYTES_AT_ONCE = 16 * 2**20


@dataclass
class Chunk:
    """Everything about a group's chunks that does not depend on the state."""

    key: Tensor  # [Z, C, K], normalised
    probe_query: Tensor  # [Z, 2C, K], normalised: rows of p, then rows of q
    value: Tensor  # [Z, C, V]
    beta: Tensor  # [Z, C], as are the next two
    eta: Tensor
    alpha: Tensor  # what p is multiplied with: alpha, or ones
    decay_alpha: Tensor  # [Z, C+1, C+1], as are the next two
    decay_mu: Tensor
    gamma: Tensor
    scores: Tensor  # [Z, 2C, C]: (P K^T), then (Q K^T), without coefficients
    attend: Tensor  # [Z, C, C]
    inverse: Tensor  # [Z, C, C]: (I + A)^-1
    read: Tensor  # [Z, 2C, 2K]: read_P, then read_Q
    write: Tensor  # [Z, C, 2K]


@dataclass
class Write:
    """The part of a chunk that advances the state."""

    write: Tensor  # [Z, C, 2K]
    keep_fast_weight: Tensor  # [Z, 1, 1]: abar_C, as are the next two b_C and mbar_C
    leak_momentum: Tensor
    keep_momentum: Tensor

    def advance_(self, state: Tensor, errors: Tensor, chunks: slice) -> None:
        """X' = D X + write^T R, in place, for one round."""
        fast_weight, momentum = state.chunk(2, dim=1)
        fast_weight.mul_(self.keep_fast_weight[chunks]).addcmul_(momentum, self.leak_momentum[chunks], value=-1)
        momentum.mul_(self.keep_momentum[chunks])
        state.baddbmm_(self.write[chunks].mT, errors)

    def retreat_(self, grad_state: Tensor, chunks: slice) -> None:
        """D^T applied to the gradient of X', in place."""
        grad_fast_weight, grad_momentum = grad_state.chunk(2, dim=1)
        grad_momentum.mul_(self.keep_momentum[chunks])
        grad_momentum.addcmul_(grad_fast_weight, self.leak_momentum[chunks], value=-1)
        grad_fast_weight.mul_(self.keep_fast_weight[chunks])


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    initial_state: Tensor | None,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
    save_residual: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q)
    reader = ChunkReader(q, k, v, p, log_alpha, log_mu, beta, eta, options, dtype)
    slabs = plan(q, v, boundaries, options.chunk_size)
    final_state = starting_states(initial_state, q, v, boundaries, dtype)
    o = ChunkWriter(torch.empty_like(v, memory_format=torch.contiguous_format))
    residual = ChunkWriter(v.new_empty(v.shape if save_residual else (0,), dtype=dtype))
    for slab in slabs:
        state = stacked(final_state, slab.sequences)
        for group in slab.groups:
            chunk = prepare(reader, group, options)
            advance = chunk_write(chunk)
            outputs = torch.empty_like(chunk.value)
            errors = torch.empty_like(chunk.value)
            for first, end in group.rounds:
                z = slice(first * reader.heads, end * reader.heads)
                _forward_round(chunk, advance, z, state[: z.stop - z.start], outputs, errors)
            o.put(outputs, group)
            if save_residual:
                residual.put(errors, group)
        unstack(state, final_state, slab.sequences)
    return o.tensor, final_state, residual.tensor


def _forward_round(chunk: Chunk, advance: Write, z: slice, state: Tensor, outputs: Tensor, errors: Tensor) -> None:
    size = chunk.key.shape[1]
    target = torch.baddbmm(chunk.value[z], chunk.read[z, :size], state)
    torch.bmm(chunk.inverse[z], target, out=errors[z])
    torch.bmm(chunk.read[z, size:], state, out=outputs[z])
    outputs[z].baddbmm_(chunk.attend[z], errors[z])
    advance.advance_(state, errors[z], z)


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    initial_state: Tensor | None,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> tuple[Tensor | None, ...]:
    dtype = compute_dtype(q)
    reader = ChunkReader(q, k, v, p, log_alpha, log_mu, beta, eta, options, dtype)
    slabs = plan(q, v, boundaries, options.chunk_size, state_bytes=STATE_BYTES_AT_ONCE)
    start = starting_states(initial_state, q, v, boundaries, dtype)
    grad_state_all = torch.zeros_like(start) if grad_final_state is None else grad_final_state.to(dtype, copy=True)
    grads = GradientWriters(q, k, v, p, log_alpha, log_mu, beta, eta)
    for slab in slabs:
        group_starts = _group_start_states(reader, slab, start, residual, options)
        grad_state = stacked(grad_state_all, slab.sequences)
        for group, group_start in zip(reversed(slab.groups), reversed(group_starts)):
            chunk = prepare(reader, group, options)
            errors = reader.values(residual, group)
            _backward_group(chunk, group, group_start, errors, reader.values(grad_o, group), grad_state, grads, reader)
        unstack(grad_state, grad_state_all, slab.sequences)
    grad_initial = None if initial_state is None else grad_state_all.to(initial_state.dtype)
    return (*grads.results(), grad_initial)


def _backward_group(
    chunk: Chunk,
    group: Group,
    group_start: Tensor,
    errors: Tensor,
    grad_outputs: Tensor,
    grad_state: Tensor,
    grads: GradientWriters,
    reader: ChunkReader,
) -> None:
    """One group, last round first. Within a round everything that does not need the next one is left for later batches."""
    size, heads = chunk.key.shape[1], reader.heads
    advance = chunk_write(chunk)
    states = _states_of_group(advance, group, group_start, errors, heads)
    grad_after = torch.empty_like(states)  # gradient of X' of every chunk
    # rows of dW, then rows of dO: one product then serves dX, d(read) and d(scores) of both halves
    grad_targets = torch.cat([torch.bmm(chunk.attend.mT, grad_outputs), grad_outputs], dim=1)
    for first, end in reversed(group.rounds):
        z = slice(first * heads, end * heads)
        current = grad_state[: z.stop - z.start]
        grad_after[z] = current
        grad_errors = torch.baddbmm(grad_targets[z, :size], chunk.write[z], current)
        grad_targets[z, :size] = torch.bmm(chunk.inverse[z].mT, grad_errors)
        advance.retreat_(current, z)
        current.baddbmm_(chunk.read[z].mT, grad_targets[z])
    grad_read = torch.bmm(grad_targets, states.mT)
    grad_write = torch.bmm(errors, grad_after.mT)
    grad_scores = torch.bmm(grad_targets, errors.mT)
    grad_scores[:, :size].neg_()  # R = (I + A)^-1 W  =>  dA = -dW R^T
    grad_mixing = _mixing_gradients(states, grad_after)
    _chunk_gradients(chunk, group, grad_read, grad_write, grad_scores, grad_mixing, grads, reader)
    grads.value.put(grad_targets[:, :size], group)


def _mixing_gradients(states: Tensor, grad_after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of abar_C, b_C and mbar_C through D: inner products of state and gradient, [Z] each."""
    fast_weight, momentum = (x.flatten(1) for x in states.chunk(2, dim=1))
    grad_fast_weight, grad_momentum = (x.flatten(1) for x in grad_after.chunk(2, dim=1))
    return (
        torch.linalg.vecdot(grad_fast_weight, fast_weight),
        -torch.linalg.vecdot(grad_fast_weight, momentum),
        torch.linalg.vecdot(grad_momentum, momentum),
    )


def _chunk_gradients(
    chunk: Chunk,
    group: Group,
    grad_read: Tensor,
    grad_write: Tensor,
    grad_scores: Tensor,
    grad_mixing: tuple[Tensor, Tensor, Tensor],
    grads: GradientWriters,
    reader: ChunkReader,
) -> None:
    """From the gradients of read, write and scores to those of q, k, p and the gates."""
    size = chunk.key.shape[1]
    alpha, eta, scale = chunk.alpha, chunk.eta, reader.options.scale
    row_factor = torch.cat([alpha, torch.full_like(alpha, scale)], dim=1)  # [Z, 2C]
    gamma_rows = torch.cat([chunk.gamma[:, :-1, 1:], chunk.gamma[:, 1:, 1:]], dim=1)  # [Z, 2C, C]

    # scores * gamma * row_factor_i * eta_j
    weighted = grad_scores * chunk.scores
    outer = row_factor.unsqueeze(-1) * eta.unsqueeze(1)
    grad_gamma_rows = weighted * outer
    weighted.mul_(gamma_rows)
    grad_row_factor = torch.bmm(weighted, eta.unsqueeze(-1)).squeeze(-1)
    grad_eta = torch.bmm(row_factor.unsqueeze(1), weighted).squeeze(1)
    grad_scores.mul_(gamma_rows).mul_(outer)
    grad_probe_query = torch.bmm(grad_scores, chunk.key)
    grad_key = torch.bmm(grad_scores.mT, chunk.probe_query)

    # read = probe_query * row_factor * (signed abar, b of the row)
    signed = read_coefficients(chunk)
    grad_read = grad_read.unflatten(-1, (2, -1))
    pull = torch.einsum("zcsk,zck->zcs", grad_read, chunk.probe_query)
    grad_row_factor += (pull * signed).sum(-1)
    grad_signed = pull * row_factor.unsqueeze(-1)
    grad_probe_query += torch.einsum("zcsk,zcs->zck", grad_read, signed * row_factor.unsqueeze(-1))

    # write = key * eta * (gamma_C, -decay_mu_C)
    last = torch.stack([chunk.gamma[:, -1, 1:], -chunk.decay_mu[:, -1, 1:]], dim=-1)
    grad_write = grad_write.unflatten(-1, (2, -1))
    pull = torch.einsum("zcsk,zck->zcs", grad_write, chunk.key)
    grad_eta += (pull * last).sum(-1)
    grad_last = pull * eta.unsqueeze(-1)
    grad_key += torch.einsum("zcsk,zcs->zck", grad_write, last * eta.unsqueeze(-1))

    # collect everything that reads decay_alpha, decay_mu and gamma
    grad_abar_end, grad_b_end, grad_mbar_end = grad_mixing
    grad_gamma = torch.zeros_like(chunk.gamma)
    grad_gamma[:, :-1, 1:] = grad_gamma_rows[:, :size]
    grad_gamma[:, 1:, 1:] += grad_gamma_rows[:, size:]
    grad_gamma[:, -1, 1:] += grad_last[..., 0]
    grad_gamma[:, :-1, 0] += grad_signed[:, :size, 1]
    grad_gamma[:, 1:, 0] -= grad_signed[:, size:, 1]
    grad_gamma[:, -1, 0] += grad_b_end
    grad_decay_alpha = torch.zeros_like(chunk.gamma)
    grad_decay_alpha[:, :-1, 0] -= grad_signed[:, :size, 0]
    grad_decay_alpha[:, 1:, 0] += grad_signed[:, size:, 0]
    grad_decay_alpha[:, -1, 0] += grad_abar_end
    grad_decay_mu = torch.zeros_like(chunk.gamma)
    grad_decay_mu[:, -1, 1:] -= grad_last[..., 1]
    grad_decay_mu[:, -1, 0] += grad_mbar_end
    grad_log_alpha, grad_log_mu, grad_beta = momentum_coefficients_adjoint(
        grad_decay_alpha, grad_decay_mu, grad_gamma, chunk.decay_alpha, chunk.decay_mu, chunk.beta
    )
    if reader.options.p_times_alpha:
        grad_log_alpha += grad_row_factor[:, :size] * alpha

    grads.put_gates(group, grad_log_alpha, grad_log_mu, grad_beta, grad_eta)
    grads.put_vectors(group, reader, chunk, grad_key, grad_probe_query)


# -------------------------------------------------------------------------------------------------- chunk-local work


def prepare(reader: ChunkReader, group: Group, options: RuleOptions) -> Chunk:
    key, probe_query = reader.keys(group)
    log_alpha, log_mu, beta, eta = reader.gates(group)
    decay_alpha, decay_mu, gamma = momentum_coefficients(log_alpha, log_mu, beta)
    alpha = log_alpha.exp() if options.p_times_alpha else torch.ones_like(log_alpha)
    size = key.shape[1]

    scores = torch.bmm(probe_query, key.mT)
    attend = scores[:, size:] * gamma[:, 1:, 1:] * (options.scale * eta).unsqueeze(1)
    system = scores[:, :size] * gamma[:, :-1, 1:] * alpha.unsqueeze(-1) * eta.unsqueeze(1)
    identity = torch.eye(size, dtype=key.dtype, device=key.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)

    chunk = Chunk(
        key=key,
        probe_query=probe_query,
        value=reader.values(reader.v, group),
        beta=beta,
        eta=eta,
        alpha=alpha,
        decay_alpha=decay_alpha,
        decay_mu=decay_mu,
        gamma=gamma,
        scores=scores,
        attend=attend,
        inverse=inverse,
        read=key,
        write=key,
    )
    row_factor = torch.cat([alpha, torch.full_like(alpha, options.scale)], dim=1)
    chunk.read = spread(probe_query, read_coefficients(chunk) * row_factor.unsqueeze(-1))
    chunk.write = spread(key, torch.stack([gamma[:, -1, 1:] * eta, -decay_mu[:, -1, 1:] * eta], dim=-1))
    return chunk


def read_coefficients(chunk: Chunk) -> Tensor:
    """[Z, 2C, 2]: what multiplies the rows of P and Q in front of S and of M."""
    before = torch.stack([-chunk.decay_alpha[:, :-1, 0], chunk.gamma[:, :-1, 0]], dim=-1)
    after = torch.stack([chunk.decay_alpha[:, 1:, 0], -chunk.gamma[:, 1:, 0]], dim=-1)
    return torch.cat([before, after], dim=1)


def spread(rows: Tensor, factors: Tensor) -> Tensor:
    """rows [Z, n, K] and factors [Z, n, 2] to [Z, n, 2K]: [rows * factor_0, rows * factor_1]."""
    return (rows.unsqueeze(2) * factors.unsqueeze(-1)).flatten(2)


def chunk_write(chunk: Chunk) -> Write:
    return Write(
        chunk.write,
        chunk.decay_alpha[:, -1:, :1],
        chunk.gamma[:, -1:, :1],
        chunk.decay_mu[:, -1:, :1],
    )


def _write_only(reader: ChunkReader, group: Group) -> Write:
    """The same from the last rows alone: cheaper than ``prepare`` where only the states are wanted."""
    key = reader.only_keys(group)
    log_alpha, log_mu, beta, eta = reader.gates(group)
    decay_mu = segment_decay(log_mu)
    tail = log_alpha.flip(-1).cumsum(-1).flip(-1)  # sum over l >= j
    after = torch.cat([tail[:, 1:], torch.zeros_like(tail[:, :1])], dim=1).exp()  # prod_{l > j} alpha_l
    gamma_last = torch.bmm((after * beta).unsqueeze(1), decay_mu[:, 1:])  # [Z, 1, C+1]
    write = spread(key, torch.stack([gamma_last[:, 0, 1:] * eta, -decay_mu[:, -1, 1:] * eta], dim=-1))
    return Write(write, tail[:, :1, None].exp(), gamma_last[:, :, :1], decay_mu[:, -1:, :1])


# ---------------------------------------------------------------------------------------------------------- states


def plan(
    q: Tensor, v: Tensor, boundaries: SequenceBoundaries | None, chunk_limit: int, state_bytes: int | None = None
) -> tuple[Slab, ...]:
    starts, lengths = sequences_of(v.shape[0], v.shape[1], boundaries)
    longest = max(lengths, default=0)
    mean = sum(lengths) / max(1, sum(1 for n in lengths if n))
    size = choose_chunk_size(chunk_limit, longest, mean, q.shape[-1])
    most = PAIRS_AT_ONCE
    if state_bytes is not None:
        one_state = 2 * q.shape[-1] * v.shape[-1] * compute_dtype(q).itemsize
        most = min(most, max(1, state_bytes // one_state))
    return make_schedule(starts, lengths, size, v.shape[-2], most, v.device)


def starting_states(
    initial_state: Tensor | None, q: Tensor, v: Tensor, boundaries: SequenceBoundaries | None, dtype: torch.dtype
) -> Tensor:
    """[2, N, HV, K, V], a copy of the initial state or zeros."""
    if initial_state is not None:
        return initial_state.to(dtype, copy=True, memory_format=torch.contiguous_format)
    sequences = v.shape[0] if boundaries is None else boundaries.num_sequences
    return v.new_zeros(2, sequences, v.shape[-2], q.shape[-1], v.shape[-1], dtype=dtype)


def stacked(states: Tensor, sequences: tuple[int, ...]) -> Tensor:
    """[2, N, HV, K, V] to the slab's [n * HV, 2K, V]."""
    chosen = states[:, list(sequences)]
    return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1).contiguous()


def unstack(state: Tensor, states: Tensor, sequences: tuple[int, ...]) -> None:
    """Write a slab's [n * HV, 2K, V] back into [2, N, HV, K, V]."""
    heads, key_dim = states.shape[2:4]
    states[:, list(sequences)] = state.unflatten(0, (-1, heads)).unflatten(2, (2, key_dim)).permute(2, 0, 1, 3, 4)


def _group_start_states(
    reader: ChunkReader, slab: Slab, start: Tensor, residual: Tensor, options: RuleOptions
) -> list[Tensor]:
    """The slab's state before each group, rebuilt from R."""
    state = stacked(start, slab.sequences)
    states = [state]
    for group in slab.groups[:-1]:
        advance = _write_only(reader, group)
        errors = reader.values(residual, group)
        state = state.clone()
        for first, end in group.rounds:
            z = slice(first * reader.heads, end * reader.heads)
            advance.advance_(state[: z.stop - z.start], errors[z], z)
        states.append(state)
    return states


def _states_of_group(advance: Write, group: Group, group_start: Tensor, errors: Tensor, heads: int) -> Tensor:
    """[Z, 2K, V]: the state before every chunk of the group."""
    states = group_start.new_empty(errors.shape[0], *group_start.shape[1:])
    state = group_start.clone()
    last_round = group.rounds[-1]
    for first, end in group.rounds:
        z = slice(first * heads, end * heads)
        current = state[: z.stop - z.start]
        states[z] = current
        if (first, end) != last_round:
            advance.advance_(current, errors[z], z)
    return states


class GradientWriters:
    """The gradients of q, k, v, p and the gates, filled group by group."""

    def __init__(self, q, k, v, p, log_alpha, log_mu, beta, eta):
        self.query, self.key, self.value = (ChunkWriter.like(x) for x in (q, k, v))
        self.probe = None if p is None else ChunkWriter.like(p)
        self.gates = [ChunkWriter.like(x) for x in (log_alpha, log_mu, beta, eta)]

    def put_gates(self, group: Group, *gradients: Tensor) -> None:
        for writer, gradient in zip(self.gates, gradients):
            writer.put_gate(gradient, group)

    def put_vectors(
        self, group: Group, reader: ChunkReader, chunk: Chunk, grad_key: Tensor, grad_probe_query: Tensor
    ) -> None:
        size = chunk.key.shape[1]
        grad_probe, grad_query = grad_probe_query[:, :size], grad_probe_query[:, size:]
        if self.probe is None:
            grad_key += grad_probe
        else:
            self.probe.put(reader.through_norm("p", grad_probe, chunk.probe_query[:, :size], group), group)
        self.key.put(reader.through_norm("k", grad_key, chunk.key, group), group)
        self.query.put(reader.through_norm("q", grad_query, chunk.probe_query[:, size:], group), group)

    def results(self) -> tuple[Tensor | None, ...]:
        probe = None if self.probe is None else self.probe.tensor
        vectors = (self.query.tensor, self.key.tensor, self.value.tensor, probe)
        return (*vectors, *(writer.tensor for writer in self.gates))

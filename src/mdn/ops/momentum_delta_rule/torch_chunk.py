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
from mdn.ops.momentum_delta_rule.chunk_io import ChunkReader, ChunkWriter, Gates, Unit
from mdn.ops.momentum_delta_rule.coefficients import momentum_coefficients, momentum_coefficients_adjoint, segment_decay
from mdn.ops.momentum_delta_rule.options import RuleOptions, compute_dtype
from mdn.ops.momentum_delta_rule.schedule import Group, Slab, choose_chunk_size, make_schedule, sequences_of

# (chunk, head) pairs worked on at once, and bytes of their states: larger batches fall out of the caches, and larger
# temporaries are given back to the system after each use and fault in again.
PAIRS_AT_ONCE = 128
STATE_BYTES_AT_ONCE = 4 * 2**20


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

    def advance_(self, state: Tensor, errors: Tensor, chunks: slice) -> None:
        """X' = D X + write^T R, in place, for one round."""
        fast_weight, momentum = state.chunk(2, dim=1)
        fast_weight.mul_(self.keep_fast_weight[chunks]).addcmul_(momentum, self.leak_momentum[chunks], value=-1)
        momentum.mul_(self.keep_momentum[chunks])
        state.baddbmm_(self.rows[chunks].mT, errors)

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
    final_state = starting_states(initial_state, q, v, boundaries, dtype)
    o = ChunkWriter.like(v)
    residual = ChunkWriter(v.new_empty(v.shape if save_residual else (0,), dtype=dtype))
    for slab in plan(q, v, boundaries, options.chunk_size):
        state = stacked(final_state, slab.sequences)
        for group in slab.groups:
            chunk = prepare(reader, group)
            outputs, errors = _forward_group(chunk, group, reader.values(v, group), state, reader.heads)
            o.put(outputs, group, factor=options.scale)
            if save_residual:
                residual.put(errors, group)
        unstack(state, final_state, slab.sequences)
    return o.tensor, final_state, residual.tensor


def _forward_group(chunk: Chunk, group: Group, values: Tensor, state: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Outputs (not yet scaled) and errors R [Z, C, V]; the state is advanced in place."""
    size = values.shape[1]
    outputs, errors = torch.empty_like(values), torch.empty_like(values)
    for first, end in group.rounds:
        z = slice(first * heads, end * heads)
        current = state[: z.stop - z.start]
        target = torch.baddbmm(values[z], chunk.read[z, :size], current)
        torch.bmm(chunk.inverse[z], target, out=errors[z])
        torch.bmm(chunk.read[z, size:], current, out=outputs[z])
        outputs[z].baddbmm_(chunk.attend[z], errors[z])
        chunk.write.advance_(current, errors[z], z)
    return outputs, errors


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
    start = starting_states(initial_state, q, v, boundaries, dtype)
    grad_state_all = torch.zeros_like(start) if grad_final_state is None else grad_final_state.to(dtype, copy=True)
    grads = GradientWriters(q, k, v, p, (log_alpha, log_mu, beta, eta), dtype)
    slabs = plan(q, v, boundaries, options.chunk_size)
    most = max((len(group.tokens) for slab in slabs for group in slab.groups), default=0) * reader.heads
    state_buffers = start.new_empty(2, most, 2 * q.shape[-1], v.shape[-1])
    for slab in slabs:
        group_starts = _group_start_states(reader, slab, start, residual)
        grad_state = stacked(grad_state_all, slab.sequences)
        for group, group_start in zip(reversed(slab.groups), reversed(group_starts)):
            chunk = prepare(reader, group)
            errors = reader.values(residual, group)
            states, grad_after = state_buffers[:, : errors.shape[0]]
            _states_of_group(chunk.write, group, group_start, errors, states, reader.heads)
            grad_targets = errors.new_empty(len(errors), 2 * errors.shape[1], errors.shape[2])
            reader.values_into(grad_targets[:, errors.shape[1] :], grad_o, group, factor=options.scale)
            _backward_rounds(chunk, group, grad_targets, grad_state, grad_after, reader.heads)
            _chunk_gradients(chunk, group, states, grad_after, errors, grad_targets, grads, reader)
        unstack(grad_state, grad_state_all, slab.sequences)
    grad_initial = None if initial_state is None else grad_state_all.to(initial_state.dtype)
    return (*grads.results(), grad_initial)


def _backward_rounds(
    chunk: Chunk, group: Group, grad_targets: Tensor, grad_state: Tensor, grad_after: Tensor, heads: int
) -> None:
    """Rounds in reverse: only what must be sequential.

    ``grad_targets`` [Z, 2C, V] comes with dO in its lower half and gets dW in its upper one: one product then serves
    d(read) and d(scores) of both halves. Fills ``grad_after`` [Z, 2K, V] with the gradient of X' of every chunk, and
    moves ``grad_state`` to before the group.
    """
    size = grad_targets.shape[1] // 2
    grad_targets[:, :size] = torch.bmm(chunk.attend.mT, grad_targets[:, size:])
    for first, end in reversed(group.rounds):
        z = slice(first * heads, end * heads)
        current = grad_state[: z.stop - z.start]
        grad_after[z] = current
        grad_errors = torch.baddbmm(grad_targets[z, :size], chunk.write.rows[z], current)
        grad_targets[z, :size] = torch.bmm(chunk.inverse[z].mT, grad_errors)  # faster than out= into a strided slice
        chunk.write.retreat_(current, z)
        current.baddbmm_(chunk.read[z].mT, grad_targets[z])


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
    states: Tensor,
    grad_after: Tensor,
    errors: Tensor,
    grad_targets: Tensor,
    grads: GradientWriters,
    reader: ChunkReader,
) -> None:
    """From the states and their gradients to the gradients of q, k, v, p and the gates."""
    size = errors.shape[1]
    grad_read = torch.bmm(grad_targets, states.mT).unflatten(-1, (2, -1))
    grad_write = torch.bmm(errors, grad_after.mT).unflatten(-1, (2, -1))
    grad_scores = torch.bmm(grad_targets, errors.mT)
    grad_scores[:, :size].neg_()  # R = (I + A)^-1 W  =>  dA = -dW R^T

    signed, last = read_coefficients(chunk.decay_alpha, chunk.gamma), write_coefficients(chunk.decay_mu, chunk.gamma)
    grad_gates = _coefficient_gradients(
        chunk,
        grad_scores * chunk.scores,
        along(grad_read, chunk.probe_query),
        along(grad_write, chunk.scaled_key),
        _mixing_gradients(states, grad_after),
    )
    grad_scores = times_gamma(grad_scores, chunk.gamma)
    grad_probe_query = torch.bmm(grad_scores, chunk.scaled_key)
    grad_scaled_key = torch.bmm(grad_scores.mT, chunk.probe_query)
    gather_(grad_probe_query, grad_read, signed)
    gather_(grad_scaled_key, grad_write, last)
    grads.value.put(grad_targets[:, :size], group)
    _vector_gradients(chunk, group, grad_probe_query, grad_scaled_key, grad_gates, grads, reader)


def _coefficient_gradients(
    chunk: Chunk, grad_gamma_rows: Tensor, grad_signed: Tensor, grad_last: Tensor, grad_mixing: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_alpha, log_mu and beta: collect all that reads decay_alpha, decay_mu and gamma."""
    size = chunk.scaled_key.shape[1]
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
    return momentum_coefficients_adjoint(
        grad_decay_alpha, grad_decay_mu, grad_gamma, chunk.decay_alpha, chunk.decay_mu, chunk.gates.beta
    )


def _vector_gradients(
    chunk: Chunk,
    group: Group,
    grad_probe_query: Tensor,
    grad_scaled_key: Tensor,
    grad_gates: tuple[Tensor, Tensor, Tensor],
    grads: GradientWriters,
    reader: ChunkReader,
) -> None:
    """Through khat = eta k, phat = alpha p and the norms. The inner products with the unit vectors serve the gates
    too."""
    size = grad_scaled_key.shape[1]
    grad_log_alpha, grad_log_mu, grad_beta = grad_gates
    grad_probe, grad_query = grad_probe_query[:, :size], grad_probe_query[:, size:]
    along_query = (grad_query * chunk.query.rows).sum(-1, keepdim=True)
    grad_eta = (grad_scaled_key * chunk.key.rows).sum(-1, keepdim=True)
    along_probe = (grad_probe * chunk.probe.rows).sum(-1, keepdim=True)
    eta = chunk.gates.eta.unsqueeze(-1)
    if reader.options.p_times_alpha:
        alpha = chunk.gates.log_alpha.exp().unsqueeze(-1)
        along_probe = along_probe * alpha
        grad_log_alpha += along_probe.squeeze(-1)
        grad_probe = grad_probe * alpha

    grad_key, along_key = grad_scaled_key * eta, grad_eta * eta
    if grads.probe is None:
        grad_key, along_key = grad_key.add_(grad_probe), along_key + along_probe
    else:
        grads.probe.put(reader.raw_gradient(grad_probe, along_probe, chunk.probe), group)
    grads.key.put(reader.raw_gradient(grad_key, along_key, chunk.key), group)
    grads.query.put(reader.raw_gradient(grad_query, along_query, chunk.query), group)
    grads.gates.put(torch.stack([grad_log_alpha, grad_log_mu, grad_beta, grad_eta.squeeze(-1)], dim=-1), group)


# -------------------------------------------------------------------------------------------------- chunk-local work


def prepare(reader: ChunkReader, group: Group) -> Chunk:
    gates = reader.gates(group)
    key = reader.unit(reader.k, group)
    probe = key if reader.p is None else reader.unit(reader.p, group)
    size, width = key.rows.shape[1:]
    probe_query = key.rows.new_empty(len(key.rows), 2 * size, width)
    query = reader.unit(reader.q, group, out=probe_query[:, size:])
    if reader.options.p_times_alpha:
        torch.mul(probe.rows, gates.log_alpha.exp().unsqueeze(-1), out=probe_query[:, :size])
    else:
        probe_query[:, :size] = probe.rows
    scaled_key = key.rows * gates.eta.unsqueeze(-1)
    decay_alpha, decay_mu, gamma = momentum_coefficients(gates.log_alpha, gates.log_mu, gates.beta)

    scores = torch.bmm(probe_query, scaled_key.mT)
    mixed = times_gamma(scores, gamma)
    identity = torch.eye(size, dtype=gamma.dtype, device=gamma.device).expand(len(gamma), -1, -1)
    inverse = torch.linalg.solve_triangular(mixed[:, :size], identity, upper=False, unitriangular=True)
    write = Write(
        spread(scaled_key, write_coefficients(decay_mu, gamma)),
        decay_alpha[:, -1:, :1],
        gamma[:, -1:, :1],
        decay_mu[:, -1:, :1],
    )
    read = spread(probe_query, read_coefficients(decay_alpha, gamma))
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
        write,
    )


def times_gamma(rows: Tensor, gamma: Tensor) -> Tensor:
    """[Z, 2C, C] * gamma: rows of P see the state before their token, rows of Q the state after it."""
    size = rows.shape[-1]
    product = torch.empty_like(rows)
    torch.mul(rows[:, :size], gamma[:, :-1, 1:], out=product[:, :size])
    torch.mul(rows[:, size:], gamma[:, 1:, 1:], out=product[:, size:])
    return product


def read_coefficients(decay_alpha: Tensor, gamma: Tensor) -> Tensor:
    """[Z, 2C, 2]: what multiplies the rows of P and Q in front of S and of M."""
    before = torch.stack([-decay_alpha[:, :-1, 0], gamma[:, :-1, 0]], dim=-1)
    after = torch.stack([decay_alpha[:, 1:, 0], -gamma[:, 1:, 0]], dim=-1)
    return torch.cat([before, after], dim=1)


def write_coefficients(decay_mu: Tensor, gamma: Tensor) -> Tensor:
    """[Z, C, 2]: what a write of the chunk is worth in S and in M at its end. Takes whole matrices or last rows."""
    return torch.stack([gamma[:, -1, 1:], -decay_mu[:, -1, 1:]], dim=-1)


def spread(rows: Tensor, factors: Tensor) -> Tensor:
    """rows [Z, n, K] and factors [Z, n, 2] to [Z, n, 2K]: [rows * factor_0, rows * factor_1]."""
    return (rows.unsqueeze(2) * factors.unsqueeze(-1)).flatten(2)


def along(pairs: Tensor, rows: Tensor) -> Tensor:
    """Inner products of pairs [Z, n, 2, K] with rows [Z, n, K]: the gradient of ``spread``'s factors."""
    return (pairs * rows.unsqueeze(2)).sum(-1)


def gather_(rows: Tensor, pairs: Tensor, factors: Tensor) -> None:
    """Add factor-weighted pairs [Z, n, 2, K] to rows [Z, n, K], in place: the gradient of ``spread``'s rows."""
    rows.addcmul_(pairs[:, :, 0], factors[..., :1]).addcmul_(pairs[:, :, 1], factors[..., 1:])


def _write_only(reader: ChunkReader, group: Group) -> Write:
    """The part of ``prepare`` that advances the state, from the last rows alone."""
    gates = reader.gates(group)
    decay_mu = segment_decay(gates.log_mu)
    from_here = gates.log_alpha.flip(-1).cumsum(-1).flip(-1)  # sum over l >= j
    after = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], dim=1).exp()  # prod_{l > j} alpha_l
    gamma_last = torch.bmm((after * gates.beta).unsqueeze(1), decay_mu[:, 1:])  # [Z, 1, C+1]
    scaled_key = reader.unit(reader.k, group).rows.mul_(gates.eta.unsqueeze(-1))
    rows = spread(scaled_key, write_coefficients(decay_mu, gamma_last))
    return Write(rows, from_here[:, :1, None].exp(), gamma_last[:, :, :1], decay_mu[:, -1:, :1])


# ---------------------------------------------------------------------------------------------------------- states


def plan(q: Tensor, v: Tensor, boundaries: SequenceBoundaries | None, chunk_limit: int) -> tuple[Slab, ...]:
    starts, lengths = sequences_of(v.shape[0], v.shape[1], boundaries)
    one_state = 2 * q.shape[-1] * v.shape[-1] * compute_dtype(q).itemsize
    most = min(PAIRS_AT_ONCE, max(1, STATE_BYTES_AT_ONCE // one_state))
    size = choose_chunk_size(chunk_limit, lengths, v.shape[-2], q.shape[-1], v.shape[-1], most)
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


def _group_start_states(reader: ChunkReader, slab: Slab, start: Tensor, residual: Tensor) -> list[Tensor]:
    """The slab's state before each group, rebuilt from R."""
    states = [stacked(start, slab.sequences)]
    for group in slab.groups[:-1]:
        write = _write_only(reader, group)
        errors = reader.values(residual, group)
        state = states[-1].clone()
        for first, end in group.rounds:
            z = slice(first * reader.heads, end * reader.heads)
            write.advance_(state[: z.stop - z.start], errors[z], z)
        states.append(state)
    return states


def _states_of_group(
    write: Write, group: Group, group_start: Tensor, errors: Tensor, states: Tensor, heads: int
) -> None:
    """Fills ``states`` [Z, 2K, V] with the state before every chunk of the group."""
    state = group_start.clone()
    for first, end in group.rounds:
        z = slice(first * heads, end * heads)
        current = state[: z.stop - z.start]
        states[z] = current
        if (first, end) != group.rounds[-1]:
            write.advance_(current, errors[z], z)


class GradientWriters:
    """The gradients of q, k, v, p and the gates, filled group by group."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, gates: tuple[Tensor, ...], dtype: torch.dtype
    ):
        self.query, self.key, self.value = (ChunkWriter.like(x) for x in (q, k, v))
        self.probe = None if p is None else ChunkWriter.like(p)
        self.gates = ChunkWriter(v.new_empty(*gates[0].shape, 4, dtype=dtype))
        self._gate_dtypes = [gate.dtype for gate in gates]

    def results(self) -> tuple[Tensor | None, ...]:
        probe = None if self.probe is None else self.probe.tensor
        gates = [x.to(dtype, copy=True) for x, dtype in zip(self.gates.tensor.unbind(-1), self._gate_dtypes)]
        return (self.query.tensor, self.key.tensor, self.value.tensor, probe, *gates)

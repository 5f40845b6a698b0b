"""The ``torch`` backend: the exact chunkwise form in plain torch, with a hand-written backward, and the decode step.

Notation and shapes: ``torch_chunk.py``. Work proceeds in the rounds and groups of ``schedule.py``: what does not depend
on the state is done for a whole group at once, the states advance round by round. Only the inputs and R are kept for
the backward pass, which rebuilds the states from R: first those before each group, then, group by group from the last
one, those before each chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.chunk_io import ChunkReader, ChunkWriter, GradientWriters
from mdn.ops.momentum.chunk_states import (
    group_start_states,
    stacked,
    starting_states,
    states_of_group,
    unstack,
)
from mdn.ops.momentum.coefficients import momentum_coefficients_adjoint
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors, compute_dtype
from mdn.ops.momentum.recurrent import step_
from mdn.ops.momentum.schedule import Group, Slab, choose_chunk_size, make_schedule, sequences_of
from mdn.ops.momentum.torch_chunk import (
    Chunk,
    along,
    gather_,
    prepare,
    read_coefficients,
    times_gamma_,
    write_coefficients,
)

__all__ = ["backward", "forward", "step_"]

# Rows (tokens of a head) worked on at once, and bytes of the states: larger batches of products fall out of the caches.
ROWS_AT_ONCE = 8192
STATE_BYTES_AT_ONCE = 16 * 2**20


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    q, k, v, p, log_alpha, log_mu, beta, eta, initial_state = tensors
    dtype = compute_dtype(q)
    reader = ChunkReader(q, k, v, p, log_alpha, log_mu, beta, eta, options, dtype)
    final_state = starting_states(initial_state, q, v, boundaries, dtype)
    o = ChunkWriter.like(v)
    residual = ChunkWriter(v.new_empty(v.shape if save_residual else (0,), dtype=dtype))
    for slab in plan(q, v, boundaries, options.chunk_size):
        state = stacked(final_state, slab.sequences)
        for group in slab.groups:
            chunk = prepare(reader, group)
            current = group.states_of(state, reader.heads)
            outputs, errors = _forward_group(chunk, group, reader, current)
            group.put_states(current, state, reader.heads)
            o.put(outputs, group, factor=options.scale)
            if save_residual:
                residual.put(errors, group)
        unstack(state, final_state, slab.sequences)
    reader.workspace.end_call()
    return ForwardResult(o.tensor, final_state, residual.tensor)


def _forward_group(chunk: Chunk, group: Group, reader: ChunkReader, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (not yet scaled) and errors R [Z, C, V]; the state is advanced in place."""
    targets = reader.values("values", reader.v, group)
    size = targets.shape[1]
    outputs, errors = (reader.workspace.take(name, *targets.shape) for name in ("outputs", "errors"))
    for first, end in group.rounds:
        z = slice(first * reader.heads, end * reader.heads)
        current = state[: z.stop - z.start]
        targets[z].baddbmm_(chunk.read[z, :size], current)
        torch.bmm(chunk.inverse[z], targets[z], out=errors[z])
        torch.bmm(chunk.read[z, size:], current, out=outputs[z])
        chunk.write.advance(current, errors[z], z, out=current)
    return outputs.baddbmm_(chunk.attend, errors), errors


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    q, k, v, p, log_alpha, log_mu, beta, eta, initial_state = tensors
    dtype = compute_dtype(q)
    reader = ChunkReader(q, k, v, p, log_alpha, log_mu, beta, eta, options, dtype)
    start = starting_states(initial_state, q, v, boundaries, dtype)
    grad_state_all = torch.zeros_like(start) if grad_final_state is None else grad_final_state.to(dtype, copy=True)
    grads = GradientWriters(q, k, v, p, (log_alpha, log_mu, beta, eta), dtype)
    take, grad_o = reader.workspace.take, grad_o.contiguous()
    for slab in plan(q, v, boundaries, options.chunk_size):
        group_starts = group_start_states(reader, slab, start, residual)
        grad_state = stacked(grad_state_all, slab.sequences)
        for group, group_start in zip(reversed(slab.groups), reversed(group_starts)):
            chunk = prepare(reader, group)
            errors = reader.values("errors", residual, group)
            pairs, size, width = errors.shape
            states = states_of_group(reader, chunk.write, group, group_start, errors)
            grad_targets = take("grad targets", pairs, 2 * size, width)
            reader.load(grad_o, group, grad_targets[:, size:], factor=options.scale)
            grad_after = take("grad after", *states.shape)
            current = group.states_of(grad_state, reader.heads)
            _backward_rounds(chunk, group, grad_targets, current, grad_after, reader.heads)
            group.put_states(current, grad_state, reader.heads)
            _chunk_gradients(chunk, group, states, grad_after, errors, grad_targets, grads, reader)
        unstack(grad_state, grad_state_all, slab.sequences)
    reader.workspace.end_call()
    grad_initial = None if initial_state is None else grad_state_all.to(initial_state.dtype)
    return RuleTensors(*grads.results(), grad_initial)  # type: ignore[call-arg, arg-type]


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
    arrived = 0  # rows of the state that a later round has handed on
    for number, (first, end) in reversed(list(enumerate(group.rounds))):
        z = slice(first * heads, end * heads)
        count = z.stop - z.start
        current = grad_after[z]
        current[arrived:] = grad_state[arrived:count]
        grad_errors = torch.baddbmm(grad_targets[z, :size], chunk.write.rows[z], current)
        grad_targets[z, :size] = torch.bmm(chunk.inverse[z].mT, grad_errors)  # faster than out= into a strided slice
        previous = grad_after[group.rounds[number - 1][0] * heads :] if number else grad_state
        chunk.write.retreat(current, z, out=previous[:count])
        previous[:count].baddbmm_(chunk.read[z].mT, grad_targets[z])
        arrived = count


def _mixing_gradients(states: Tensor, grad_after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of abar_C, b_C and mbar_C through D: inner products of state and gradient, [Z] each."""
    after, before = (x.view(len(x), 2, -1) for x in (grad_after, states))  # [Z, 2, K V]: of S, of M
    inner = torch.bmm(after, before.mT)  # [Z, 2, 2]; one pass, many times faster than vecdot
    return inner[:, 0, 0], -inner[:, 0, 1], inner[:, 1, 1]


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
    take = reader.workspace.take
    (pairs, size, _), both = chunk.key.shape, states.shape[1]
    read_out, write_out = take("grad read", pairs, 2 * size, both), take("grad write", pairs, size, both)
    grad_read = torch.bmm(grad_targets, states.mT, out=read_out).unflatten(-1, (2, -1))
    grad_write = torch.bmm(errors, grad_after.mT, out=write_out).unflatten(-1, (2, -1))
    grad_mixed = torch.bmm(grad_targets, errors.mT, out=take("grad scores", *chunk.scores.shape))
    grad_mixed[:, :size].mul_(-1.0 if chunk.alpha is None else -chunk.alpha)  # R = (I + A)^-1 W  =>  dA = -dW R^T
    grads.value.put(grad_targets[:, :size], group)

    reading = read_coefficients(chunk.coefficients, chunk.alpha)
    writing = write_coefficients(chunk.coefficients.written, chunk.coefficients.gamma)
    # read and write are not needed any more: their memory takes the products
    grad_reading = along(grad_read, chunk.probe_query, scratch=chunk.read)
    grad_writing = along(grad_write, chunk.key, scratch=chunk.write.rows)
    grad_gamma_rows = torch.mul(grad_mixed, chunk.scores, out=take("grad gamma rows", *chunk.scores.shape))
    grad_scores = times_gamma_(grad_mixed, chunk.coefficients.gamma)
    weight = chunk.scores.mul_(grad_scores)  # every score times its gradient
    along_read = weight.sum(-1) + (reading * grad_reading).sum(-1)  # <gradient, vector> of every probe and query
    along_key = weight.sum(-2) + (writing * grad_writing).sum(-1)
    mixing = _mixing_gradients(states, grad_after)
    grad_gates = _gate_gradients(chunk, grad_gamma_rows, grad_reading, grad_writing, mixing, reader)
    if chunk.alpha is not None:
        grad_gates[0] += along_read[:, :size]
    grads.gates.put(torch.stack(grad_gates, dim=-1), group)

    gradients = _row_gradients(chunk, grad_scores, grad_read, grad_write, reading, writing, reader)
    _put_vector_gradients(chunk, group, gradients, along_read, along_key, grads, reader)


def _gate_gradients(
    chunk: Chunk,
    grad_gamma_rows: Tensor,
    grad_reading: Tensor,
    grad_writing: Tensor,
    grad_mixing: tuple[Tensor, ...],
    reader: ChunkReader,
) -> list[Tensor]:
    """Gradients of log_alpha (but for what multiplies p), log_mu, beta and eta: collect all that reads the
    coefficients."""
    size = chunk.key.shape[1]
    grad_abar_end, grad_b_end, grad_mbar_end = grad_mixing
    before, after = grad_reading[:, :size], grad_reading[:, size:]  # [Z, C, 2]: of -abar, b and of abar, -b
    if chunk.alpha is not None:
        before = before * chunk.alpha
    grad_starts = F.pad(after, (0, 0, 1, 0)) - F.pad(before, (0, 0, 0, 1))  # [Z, C+1, 2]: of abar, -b
    grad_starts[:, -1, 0] += grad_abar_end
    grad_starts[:, -1, 1] -= grad_b_end

    grad_gamma = reader.workspace.take("grad gamma", *chunk.coefficients.gamma.shape)
    torch.neg(grad_starts[..., 1], out=grad_gamma[..., 0])
    grad_gamma[:, 0, 1:] = 0.0
    grad_gamma[:, 1:, 1:] = grad_gamma_rows[:, size:]
    grad_gamma[:, :-1, 1:] += grad_gamma_rows[:, :size]
    grad_gamma[:, -1, 1:] += grad_writing[..., 0]
    grad_written_end = torch.cat([grad_mbar_end.unsqueeze(-1), -grad_writing[..., 1]], dim=-1)
    return list(
        momentum_coefficients_adjoint(
            grad_starts[..., 0],
            grad_written_end,
            grad_gamma,
            chunk.coefficients,
            chunk.gates.beta,
            chunk.gates.eta,
            reader.workspace.take,
        )
    )


def _row_gradients(
    chunk: Chunk,
    grad_scores: Tensor,
    grad_read: Tensor,
    grad_write: Tensor,
    reading: Tensor,
    writing: Tensor,
    reader: ChunkReader,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of the normalised k, p (None when it is k) and q, [Z, C, K]."""
    size = chunk.key.shape[1]

    def product(name: str, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right, out=reader.workspace.take(name, *chunk.key.shape))

    grad_query = product("grad query", grad_scores[:, size:], chunk.key)
    grad_probe = product("grad probe", grad_scores[:, :size], chunk.key)
    gather_(grad_query, grad_read[:, size:], reading[:, size:])
    gather_(grad_probe, grad_read[:, :size], reading[:, :size])
    if reader.p is None:
        grad_key = grad_probe.baddbmm_(grad_scores.mT, chunk.probe_query)
    else:
        grad_key = product("grad key", grad_scores.mT, chunk.probe_query)
    gather_(grad_key, grad_write, writing)
    return grad_key, None if reader.p is None else grad_probe, grad_query


def _put_vector_gradients(
    chunk: Chunk,
    group: Group,
    gradients: tuple[Tensor, Tensor | None, Tensor],
    along_read: Tensor,
    along_key: Tensor,
    grads: GradientWriters,
    reader: ChunkReader,
) -> None:
    """Through the norms. ``along`` [Z, C] are the inner products of gradients and vectors."""
    size = chunk.key.shape[1]
    grad_key, grad_probe, grad_query = gradients
    probe, query = chunk.probe_query[:, :size], chunk.probe_query[:, size:]
    if grad_probe is None:
        along_key = along_key + along_read[:, :size]
    else:
        assert grads.probe is not None
        reader.put_gradient(grads.probe, group, grad_probe, probe, along_read[:, :size], chunk.norms.probe)
    reader.put_gradient(grads.key, group, grad_key, chunk.key, along_key, chunk.norms.key)
    reader.put_gradient(grads.query, group, grad_query, query, along_read[:, size:], chunk.norms.query)


def plan(q: Tensor, v: Tensor, boundaries: SequenceBoundaries | None, chunk_limit: int) -> tuple[Slab, ...]:
    starts, lengths = sequences_of(v.shape[0], v.shape[1], boundaries)
    one_state = 2 * q.shape[-1] * v.shape[-1] * compute_dtype(q).itemsize
    states = max(1, STATE_BYTES_AT_ONCE // one_state)
    size = choose_chunk_size(chunk_limit, lengths, v.shape[-2], q.shape[-1], v.shape[-1], ROWS_AT_ONCE, states)
    return make_schedule(starts, lengths, size, v.shape[-2], min(ROWS_AT_ONCE // size, states), v.device)

"""The momentum delta rule as it is defined: one token after another.

    r_t = v_t - S_{t-1}^T p_t               prediction error
    M_t = mu_t M_{t-1} - eta_t k_t r_t^T    momentum
    S_t = alpha_t S_{t-1} - beta_t M_t      fast weight
    o_t = scale * S_t^T q_t                 read-out

Plain differentiable torch; float64 stays float64. Every other form in this package is tested against this one.

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V]; gates [B, T, HV]; states [2, N, HV, K, V] (S, then M), N = B or the
number of packed sequences.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.l2norm import l2norm
from mdn.ops.momentum.blockwise import blockwise_pass
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState, compute_dtype


def effective_inputs(
    q: Tensor, k: Tensor, p: Tensor | None, log_alpha: Tensor, num_v_heads: int, options: RuleOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, p as the recurrence sees them: normalised, p decayed by alpha, q scaled, one head per value head."""
    dtype = compute_dtype(q)
    q, k = q.to(dtype), k.to(dtype)
    p = None if p is None else p.to(dtype)
    if options.l2norm:
        q, k = l2norm(q), l2norm(k)
        p = None if p is None else l2norm(p)
    p = k if p is None else p
    groups = num_v_heads // q.shape[-2]
    if groups > 1:
        q, k, p = (x.repeat_interleave(groups, dim=-2) for x in (q, k, p))
    if options.p_times_alpha:
        p = p * log_alpha.to(dtype).exp().unsqueeze(-1)
    return q * options.scale, k, p


def recurrent_form(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, block_size: int = 1
) -> tuple[Tensor, Tensor]:
    """All tokens of all sequences; ``block_size > 1`` takes the error at the state that began the block (blockwise)."""
    q, k, v, p, log_alpha, log_mu, beta, eta, initial_state = tensors
    one_pass = _one_pass if block_size == 1 else partial(blockwise_pass, block_size=block_size)
    dtype = compute_dtype(q)
    query, key, probe = effective_inputs(q, k, p, log_alpha, v.shape[-2], options)
    streams = [query, key, v.to(dtype), probe, *(gate.to(dtype) for gate in (log_alpha, log_mu, beta, eta))]
    if initial_state is None:
        sequences = v.shape[0] if boundaries is None else boundaries.num_sequences
        initial_state = v.new_zeros(2, sequences, v.shape[-2], q.shape[-1], v.shape[-1], dtype=dtype)
    initial_state = initial_state.to(dtype)

    if boundaries is None:
        o, state = one_pass(streams, initial_state)
        return o.to(v.dtype), state
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(boundaries.offsets, boundaries.offsets[1:])):
        o, state = one_pass([x[:, start:end] for x in streams], initial_state[:, n : n + 1])
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(states, dim=1)


def _one_pass(streams: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, probe, log_alpha, log_mu, beta, eta = streams
    alpha, mu = log_alpha.exp(), log_mu.exp()
    fast_weight, momentum = state.unbind(0)
    outputs = []
    for t in range(query.shape[1]):
        error = value[:, t] - torch.einsum("bhk,bhkv->bhv", probe[:, t], fast_weight)
        write = torch.einsum("bhk,bhv->bhkv", eta[:, t, :, None] * key[:, t], error)
        momentum = mu[:, t, :, None, None] * momentum - write
        fast_weight = alpha[:, t, :, None, None] * fast_weight - beta[:, t, :, None, None] * momentum
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], fast_weight))
    o = torch.stack(outputs, dim=1) if outputs else torch.empty_like(value)
    return o, torch.stack([fast_weight, momentum])


def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
    """One token, q ``[B, H, K]``, with S and M updated in place: a functional step would allocate and fault in both
    states for every token."""
    q, k, v, p, log_alpha, log_mu, beta, eta, _ = tensors
    dtype = compute_dtype(q)
    query, key, probe = effective_inputs(q, k, p, log_alpha, v.shape[-2], options)
    alpha, mu = log_alpha.to(dtype).exp(), log_mu.to(dtype).exp()
    S, M, state_indices = state
    if state_indices is not None:
        S, M = S.index_select(0, state_indices), M.index_select(0, state_indices)

    error = v.to(dtype) - torch.matmul(probe.unsqueeze(-2), S).squeeze(-2)
    write = eta.to(dtype).unsqueeze(-1) * key
    M.mul_(mu[..., None, None]).addcmul_(write.unsqueeze(-1), error.unsqueeze(-2), value=-1)
    S.mul_(alpha[..., None, None]).addcmul_(M, beta.to(dtype)[..., None, None], value=-1)
    o = torch.matmul(query.unsqueeze(-2), S).squeeze(-2)

    if state_indices is not None:
        state.S.index_copy_(0, state_indices, S)
        state.M.index_copy_(0, state_indices, M)
    return o.to(v.dtype)

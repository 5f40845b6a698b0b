"""The momentum delta rule as it is defined, its blockwise variant, and the decode step: plain torch.

    r_t = v_t - S_{t-1}^T p_t                                     prediction error                      (1)
    M_t = mu_t M_{t-1} - eta_t k_t r_t^T                          momentum
    S_t = alpha_t S_{t-1} - beta_t M_t + direct_t k_t r_t^T       fast weight; direct is zero unless given
    o_t = scale * S_t^T q_t                                       read-out

With look-ahead the error is read at alpha_t S_{t-1} - beta_t mu_t M_{t-1} instead of S_{t-1}. With vector decays
alpha_t, and perhaps mu_t, is a number for every row of the states.

Differentiable by autograd, also twice and forward; float64 stays float64. Every other form is tested against this one.

Blockwise momentum takes every error of a block at the state that began it, so there is no triangular system. With the
coefficients (3) to (5) of docs/derivation.md for a block of C tokens and S0, M0 before it:

    R  = V - P S0
    O  = abar Q S0 - b Q M0 + attend R                attend = (Q K^T) * gamma_S
    S' = abar_C S0 - b_C M0 + K^T diag(write_S) R
    M' = mbar_C M0 - K^T diag(write_M) R

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V]; gates [B, T, HV]; states [2, N, HV, K, V] (S, then M), N = B or the
number of packed sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import chunk_scan
from mdn.ops.l2norm import l2norm
from mdn.ops.momentum.chunk_math import GateRows, coefficients_of
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState, compute_dtype


class TokenInputs(NamedTuple):
    """What the recurrence (1) sees, one head per value head: vectors normalised, q scaled, p given and decayed."""

    q: Tensor  # [B, T, HV, K], as are k and p; without T for a single token
    k: Tensor
    v: Tensor  # [B, T, HV, V]
    p: Tensor
    log_alpha: Tensor  # [B, T, HV], as are all gates; or [B, T, HV, K], as log_mu may be too
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    direct: Tensor | None
    alpha: Tensor  # [B, T, HV, 1 or K]: exp(log_alpha), a factor of rows

    @property
    def gates(self) -> tuple[Tensor | None, ...]:
        return self.log_alpha, self.log_mu, self.beta, self.eta, self.direct

    @classmethod
    def of(cls, tensors: RuleTensors, options: RuleOptions) -> TokenInputs:
        dtype = compute_dtype(tensors.q)
        q, k, v = tensors.q.to(dtype), tensors.k.to(dtype), tensors.v.to(dtype)
        p = None if tensors.p is None else tensors.p.to(dtype)
        log_alpha = tensors.log_alpha.to(dtype)
        if options.l2norm:
            q, k, p = l2norm(q), l2norm(k), None if p is None else l2norm(p)
        p = k if p is None else p
        groups = v.shape[-2] // q.shape[-2]
        if groups > 1:
            q, k, p = (x.repeat_interleave(groups, dim=-2) for x in (q, k, p))
        alpha = per_row(log_alpha.exp(), k)
        if options.p_times_alpha:
            p = p * alpha
        return cls(
            q * options.scale,
            k,
            v,
            p,
            log_alpha,
            tensors.log_mu.to(dtype),
            tensors.beta.to(dtype),
            tensors.eta.to(dtype),
            None if tensors.direct is None else tensors.direct.to(dtype),
            alpha,
        )

    def tokens(self, start: int, end: int) -> TokenInputs:
        return TokenInputs(*(None if x is None else x[:, start:end] for x in self))  # type: ignore[arg-type]


def reference_form(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, block_size: int = 1
) -> tuple[Tensor, Tensor]:
    """o and the final states of all sequences; ``block_size > 1`` is the blockwise variant."""
    inputs, state = TokenInputs.of(tensors, options), tensors.state_to_update(boundaries)
    if boundaries is None:
        o, state = _one_sequence(inputs, state, block_size, options.lookahead)
        return o.to(tensors.v.dtype), state
    outputs, states = [inputs.v[:, :0]], [state[:, :0]]
    for n, (start, end) in enumerate(pairwise(boundaries.offsets)):
        of_sequence = inputs.tokens(start, end)
        o, final = _one_sequence(of_sequence, state[:, n : n + 1], block_size, options.lookahead)
        outputs.append(o)
        states.append(final)
    return torch.cat(outputs, dim=1).to(tensors.v.dtype), torch.cat(states, dim=1)


def _one_sequence(inputs: TokenInputs, state: Tensor, block_size: int, lookahead: bool) -> tuple[Tensor, Tensor]:
    """Rows side by side: o [B, T, HV, V] and the final state [2, B, HV, K, V]."""
    if block_size == 1:
        return _token_by_token(inputs, state, lookahead)
    return _block_by_block(inputs, state, block_size)


def _token_by_token(inputs: TokenInputs, state: Tensor, lookahead: bool) -> tuple[Tensor, Tensor]:
    q, k, v, p, _, log_mu, beta, eta, direct, alpha = inputs
    alpha, mu, beta = (per_row(x, k).unsqueeze(-1) for x in (alpha, log_mu.exp(), beta))  # [.., 1 or K, 1]
    S, M = state.unbind(0)
    outputs = []
    for t in range(q.shape[1]):
        state_at_probe = alpha[:, t] * S - beta[:, t] * mu[:, t] * M if lookahead else S  # (22)
        residual = v[:, t] - read(state_at_probe, p[:, t])
        M = mu[:, t] * M - torch.einsum("bhk,bhv->bhkv", eta[:, t, :, None] * k[:, t], residual)
        S = alpha[:, t] * S - beta[:, t] * M
        if direct is not None:
            S = S + torch.einsum("bhk,bhv->bhkv", direct[:, t, :, None] * k[:, t], residual)
        outputs.append(read(S, q[:, t]))
    o = torch.stack(outputs, dim=1) if outputs else torch.empty_like(v)
    return o, torch.stack([S, M])


def read(S: Tensor, key: Tensor) -> Tensor:
    """S^T key: [B, HV, K, V], [B, HV, K] -> [B, HV, V]. No matrix product: where ``backward()`` is called inside an
    autocast block, torch would round the gradients of one to bfloat16."""
    return (key.unsqueeze(-1) * S).sum(-2)


def _block_by_block(inputs: TokenInputs, state: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    batch, time, heads = inputs.q.shape[:3]
    size = max(1, min(block_size, time))
    q, k, v, p = (_cut(x, size) for x in (inputs.q, inputs.k, inputs.v, inputs.p))  # [blocks, B HV, C, ...]
    gates = (None if x is None else _cut(x, size).flatten(0, 1) for x in inputs.gates)
    coefficients = coefficients_of(GateRows(*gates))  # type: ignore[arg-type]
    in_blocks = (coefficients.decay_alpha, coefficients.gamma_M, coefficients.gamma_S)
    decay_alpha, gamma_M, gamma_S = (x.unflatten(0, k.shape[:2]) for x in in_blocks)  # [blocks, B HV, C+1, C+1]
    attend = q @ k.mT * gamma_S[..., 1:, 1:]
    abar_q, b_q = decay_alpha[..., 1:, :1] * q, gamma_S[..., 1:, :1] * q
    write_S, write_M = gamma_S[..., -1, 1:, None], gamma_M[..., -1, 1:, None]  # [blocks, B HV, C, 1]
    abar_C, b_C, mbar_C = (x[..., -1:, :1] for x in (decay_alpha, gamma_S, gamma_M))

    S, M = state.flatten(1, 2).unbind(0)
    outputs = []
    for n in range(len(k)):
        residual = v[n] - p[n] @ S
        outputs.append(abar_q[n] @ S - b_q[n] @ M + attend[n] @ residual)
        S = abar_C[n] * S - b_C[n] * M + k[n].mT @ (write_S[n] * residual)
        M = mbar_C[n] * M - k[n].mT @ (write_M[n] * residual)
    final_state = torch.stack([S, M]).unflatten(1, (batch, heads))
    if not outputs:
        return torch.empty_like(inputs.v), final_state
    o = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:time]  # [T, B HV, V]
    return o.unflatten(1, (batch, heads)).transpose(0, 1), final_state


def _cut(x: Tensor, size: int) -> Tensor:
    """[B, T, HV, ...] to [blocks, B HV, C, ...]: the chunker's order with rows and heads as one."""
    chunks, blocks = chunk_scan(x, None, size).split(x), -(-x.shape[1] // size)  # [blocks * B, HV, C, ...]
    return chunks.reshape(blocks, x.shape[0] * x.shape[2], *chunks.shape[2:])


def per_row(gate: Tensor, like: Tensor) -> Tensor:
    """A gate [..., HV] or [..., HV, K] as a factor of rows [..., HV, K]."""
    return gate if gate.dim() == like.dim() else gate.unsqueeze(-1)


def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
    """One token, q [B, H, K], with S and M [slots, HV, K, V] updated in place: a functional step would allocate and
    fault in both states for every token."""
    q, k, v, p, _, log_mu, beta, eta, direct, alpha = TokenInputs.of(tensors, options)
    mu = per_row(log_mu.exp(), k)  # [B, HV, 1 or K]
    S, M, state_indices = state
    if state_indices is not None:
        S = S.index_select(0, state_indices)
        M = None if M is None else M.index_select(0, state_indices)

    probed = torch.matmul((alpha * p if options.lookahead else p).unsqueeze(-2), S).squeeze(-2)
    if options.lookahead and M is not None:
        probed = probed - torch.matmul((beta.unsqueeze(-1) * mu * p).unsqueeze(-2), M).squeeze(-2)
    residual = (v - probed).unsqueeze(-2)  # [B, HV, 1, V]
    write, beta = (eta.unsqueeze(-1) * k).unsqueeze(-1), per_row(beta, k).unsqueeze(-1)  # [B, HV, K, 1], [B, HV, 1, 1]
    S.mul_(alpha.unsqueeze(-1))
    if M is None:
        S.addcmul_(beta * write, residual)
    else:
        S.addcmul_(M.mul_(mu.unsqueeze(-1)).addcmul_(write, residual, value=-1), beta, value=-1)
    if direct is not None:
        S.addcmul_((direct.unsqueeze(-1) * k).unsqueeze(-1), residual)
    o = torch.matmul(q.unsqueeze(-2), S).squeeze(-2)

    if state_indices is not None:
        state.S.index_copy_(0, state_indices, S)
        if state.M is not None and M is not None:
            state.M.index_copy_(0, state_indices, M)
    return o.to(tensors.v.dtype)

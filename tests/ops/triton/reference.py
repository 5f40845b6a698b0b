"""The float64 recurrence that the kernels are held to: the definition, token by token, differentiable by autograd.

Shapes as in docs/architecture.md. Written from the definition alone; it shares no code with the package.
"""

from __future__ import annotations

import torch


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrence(q, k, v, p, log_alpha, log_mu, beta, eta, initial_state, lengths, options):
    """(o, final_state) of N = len(lengths) sequences laid end to end in each tensor's flattened batch and time."""
    group = v.shape[2] // q.shape[2]
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    if options.l2norm:
        q, k, p = unit(q), unit(k), None if p is None else unit(p)
    p = k if p is None else p
    q, k, p = (flat(x).repeat_interleave(group, dim=1) for x in (q, k, p))
    if options.p_times_alpha:
        p = p * flat(log_alpha).exp()[..., None]
    alpha, mu, beta, eta = (flat(x) for x in (log_alpha.exp(), log_mu.exp(), beta, eta))
    values = flat(v)
    outputs, finals, token = [], [], 0
    for n, length in enumerate(lengths):
        if initial_state is None:
            S = M = values.new_zeros(values.shape[1], q.shape[-1], values.shape[-1])
        else:
            S, M = initial_state[0, n], initial_state[1, n]
        for t in range(token, token + length):
            error = values[t] - torch.einsum("hkv,hk->hv", S, p[t])
            M = mu[t, :, None, None] * M - torch.einsum("h,hk,hv->hkv", eta[t], k[t], error)
            S = alpha[t, :, None, None] * S - beta[t, :, None, None] * M
            outputs.append(options.scale * torch.einsum("hkv,hk->hv", S, q[t]))
        finals.append(torch.stack([S, M]))
        token += length
    o = torch.stack(outputs) if outputs else values
    return o.reshape(v.shape), torch.stack(finals, dim=1)

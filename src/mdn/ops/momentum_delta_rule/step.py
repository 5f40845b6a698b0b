"""One token of the momentum delta rule, with the state updated in place: the torch form of the decode step.

Shapes: q, k, p [B, H, K]; v, o [B, HV, V]; gates [B, HV]; S and M [slots, HV, K, V]. Row b works on slot
``state_indices[b]`` (or slot b). In place matters: a functional step allocates and faults in both states for every
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.ops.momentum_delta_rule.options import RuleOptions, compute_dtype
from mdn.ops.momentum_delta_rule.recurrent import effective_inputs


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    fast_weight: Tensor,
    momentum: Tensor,
    state_indices: Tensor | None,
    options: RuleOptions,
) -> Tensor:
    dtype = compute_dtype(q)
    query, key, probe = effective_inputs(q, k, p, log_alpha, v.shape[-2], options)
    alpha, mu = log_alpha.to(dtype).exp(), log_mu.to(dtype).exp()
    if state_indices is None:
        S, M = fast_weight, momentum
    else:
        S, M = fast_weight.index_select(0, state_indices), momentum.index_select(0, state_indices)

    error = v.to(dtype) - torch.matmul(probe.unsqueeze(-2), S).squeeze(-2)
    write = eta.to(dtype).unsqueeze(-1) * key
    M.mul_(mu[..., None, None]).addcmul_(write.unsqueeze(-1), error.unsqueeze(-2), value=-1)
    S.mul_(alpha[..., None, None]).addcmul_(M, beta.to(dtype)[..., None, None], value=-1)
    o = torch.matmul(query.unsqueeze(-2), S).squeeze(-2)

    if state_indices is not None:
        fast_weight.index_copy_(0, state_indices, S)
        momentum.index_copy_(0, state_indices, M)
    return o.to(v.dtype)

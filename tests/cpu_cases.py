"""Inputs for the tests of the native CPU kernel, and an independent float64 definition to compare with.

The definition is written token by token from the four equations, one sequence and one head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import RuleOptions, RuleTensors

OUTPUT_ERROR, GRADIENT_ERROR = 2e-6, 1e-5


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    log_alpha: Tensor
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    initial_state: Tensor | None

    def as_tuple(self) -> RuleTensors:
        return RuleTensors(*(getattr(self, field.name) for field in fields(self)))

    def converted(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(None if x is None else x.to(dtype) for x in self.as_tuple()))

    def leaves(self) -> Inputs:
        """float64 copies that ask for gradients."""
        return Inputs(*(None if x is None else x.double().detach().requires_grad_() for x in self.as_tuple()))


def make_inputs(
    batch: int = 1,
    time: int = 65,
    heads: int = 2,
    value_heads: int | None = None,
    key_dim: int = 32,
    value_dim: int = 48,
    sequences: int | None = None,
    with_p: bool = False,
    with_state: bool = True,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    value_heads = value_heads or heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    keys, gates = (batch, time, heads, key_dim), (batch, time, value_heads)
    return Inputs(
        q=normal(*keys),
        k=normal(*keys),
        v=normal(batch, time, value_heads, value_dim),
        p=normal(*keys) if with_p else None,
        log_alpha=-0.2 * uniform(*gates),
        log_mu=-uniform(*gates),
        beta=uniform(*gates),
        eta=2 * uniform(*gates),
        initial_state=normal(2, sequences or batch, value_heads, key_dim, value_dim) if with_state else None,
    )


def with_hostile_gates(inputs: Inputs, seed: int = 1) -> Inputs:
    """Hard zeros, ones, and gates so small that their products underflow, scattered over the tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = inputs.beta.shape

    def scattered(values: list[float], plain: Tensor) -> Tensor:
        choice = torch.randint(0, 2 * len(values), shape, generator=generator)
        for index, value in enumerate(values):
            plain = torch.where(choice == index, torch.full(shape, value), plain)
        return plain

    logs = [float("-inf"), -100.0, -20.0, 0.0]
    return replace(
        inputs,
        log_alpha=scattered(logs, inputs.log_alpha),
        log_mu=scattered(logs, inputs.log_mu),
        beta=scattered([0.0, 1.0], inputs.beta),
        eta=scattered([0.0, 2.0], inputs.eta),
    )


def options_for(inputs: Inputs, **changes) -> RuleOptions:
    return replace(RuleOptions(scale=inputs.q.shape[-1] ** -0.5), **changes)


def _normalised(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def definition(inputs: Inputs, options: RuleOptions, offsets: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """(o, final_state) in the dtype of the inputs; ``offsets`` are the sequences of a pack."""
    q, k, v, p, log_alpha, log_mu, beta, eta, initial_state = inputs.as_tuple()
    groups = v.shape[2] // q.shape[2]
    p = k if p is None else p
    if options.l2norm:
        q, k, p = _normalised(q), _normalised(k), _normalised(p)
    spans = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if offsets is not None:
        spans = [(0, start, end) for start, end in pairwise(offsets)]
    outputs, states = [], []
    for n, (row, start, end) in enumerate(spans):
        shape = (v.shape[2], q.shape[3], v.shape[3])
        S, M = (v.new_zeros(shape), v.new_zeros(shape)) if initial_state is None else initial_state[:, n]
        for t in range(start, end):
            alpha, mu = log_alpha[row, t].exp()[:, None], log_mu[row, t].exp()[:, None, None]
            key, query, probe = (x[row, t].repeat_interleave(groups, 0) for x in (k, q, p))
            probe = alpha * probe if options.p_times_alpha else probe
            r = v[row, t] - torch.einsum("hkv,hk->hv", S, probe)
            M = mu * M - eta[row, t][:, None, None] * key[:, :, None] * r[:, None, :]
            S = alpha[:, :, None] * S - beta[row, t][:, None, None] * M
            outputs.append(options.scale * torch.einsum("hkv,hk->hv", S, query))
        states.append(torch.stack([S, M]))
    o = torch.stack(outputs).reshape(v.shape) if outputs else v
    return o, torch.stack(states, 1)


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest error, relative to the largest value."""
    if wanted.numel() == 0:
        assert found.shape == wanted.shape
        return 0.0
    assert found.shape == wanted.shape
    assert not found.isnan().any()
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()


def gradients(outputs: tuple[Tensor, Tensor], inputs: Inputs, seed: int = 5) -> tuple[Tensor, Tensor, tuple]:
    """(random grad_o, random grad_final_state, gradients of every input, None where there is none)."""
    generator = torch.Generator().manual_seed(seed)
    o, final_state = outputs
    grad_o = torch.randn(o.shape, generator=generator)
    grad_state = torch.randn(final_state.shape, generator=generator)
    loss = (o * grad_o.double()).sum() + (final_state * grad_state.double()).sum()
    given = [x for x in inputs.as_tuple() if x is not None]
    found = iter(torch.autograd.grad(loss, given, materialize_grads=True))
    return grad_o, grad_state, tuple(None if x is None else next(found) for x in inputs.as_tuple())


def pack(lengths: list[int]) -> SequenceBoundaries:
    return SequenceBoundaries.from_lengths(lengths)

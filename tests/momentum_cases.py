"""Inputs for the tests of the momentum delta rule, and a float64 recurrence that shares no code with the package.

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V]; gates [B, T, HV]; states [2, N, HV, K, V], S then M.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from mdn.ops import chunk_momentum_delta_rule

Inputs = dict[str, Tensor]

OUTPUT_BAR = 2e-6
GRADIENT_BAR = 1e-5
HARD_ZERO = float("-inf")


# ------------------------------------------------------------------------------------------------------- inputs


def make_inputs(
    B: int = 2,
    T: int = 65,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int = 24,
    *,
    N: int | None = None,
    with_p: bool = False,
    with_state: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random vectors, gates inside the bounds of the layer, a random initial state of N (default B) sequences."""
    generator = torch.Generator().manual_seed(seed)
    HV = HV or H

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    inputs |= layer_gates((B, T, HV), generator)
    if with_p:  # near the key, as any sensible probe is: along an unrelated one the state would grow without bound
        inputs["p"] = inputs["k"] + 0.3 * normal(B, T, H, K)
    if with_state:
        inputs["initial_state"] = normal(2, N or B, HV, K, V)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: x.to(dtype if name in ("q", "k", "v", "p") else state_dtype) for name, x in inputs.items()}


def layer_gates(shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """alpha <= cos^2 th and beta <= sin^2 th with th = atan(eta s), eta in (0, 2), as the layer bounds them."""

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    eta = 2 * uniform()
    angle = torch.atan(4 * eta * uniform())
    return {
        "log_alpha": 2 * angle.cos().log() - 0.1 * uniform(),
        "log_mu": -2 * uniform(),
        "beta": angle.sin().square() * uniform(),
        "eta": eta,
    }


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) for name, x in inputs.items()}


def leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies that ask for gradients."""
    return {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}


def only_batch_row(inputs: Inputs, b: int) -> Inputs:
    """Row b of the batch, with its state."""
    return {name: x[:, b : b + 1] if name == "initial_state" else x[b : b + 1] for name, x in inputs.items()}


def only_tokens(inputs: Inputs, start: int, end: int, sequence: int | None = None) -> Inputs:
    """Tokens start..end; with ``sequence`` only its initial state, without it no state at all."""
    cut = {name: x[:, start:end] for name, x in inputs.items() if name != "initial_state"}
    if sequence is not None and "initial_state" in inputs:
        cut["initial_state"] = inputs["initial_state"][:, sequence : sequence + 1]
    return cut


def torch_chunk(inputs: Inputs, **options) -> tuple[Tensor, Tensor]:
    """The op under test, with its final state, and with the torch backend unless told otherwise."""
    return chunk_momentum_delta_rule(**inputs, output_final_state=True, **({"backend": "torch"} | options))


# ---------------------------------------------------------------------------------------------- independent definition


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    p: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    offsets: list[int] | None = None,
    normalise: bool = True,
    decay_p: bool = True,
    block: int = 1,
) -> tuple[Tensor, Tensor]:
    """The four equations, token by token, in the dtype of the inputs; errors are read at their block's first state."""
    p = k if p is None else p
    if normalise:
        q, k, p = unit(q), unit(k), unit(p)
    share = v.shape[2] // q.shape[2]
    head = torch.arange(v.shape[2]) // share
    q, k, p = q[:, :, head], k[:, :, head], p[:, :, head]
    alpha, mu = log_alpha.exp(), log_mu.exp()
    if decay_p:
        p = alpha[..., None] * p
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    count = q.shape[0] if offsets is None else len(offsets) - 1
    if initial_state is None:
        initial_state = v.new_zeros(2, count, v.shape[2], q.shape[3], v.shape[3])
    spans = [(slice(None), 0, q.shape[1])]
    if offsets is not None:
        spans = [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairwise(offsets))]
    outputs, finals = [], []
    for sequences, start, end in spans:
        S, M = seen = initial_state[:, sequences]
        for t in range(start, end):
            seen = S if (t - start) % block == 0 else seen
            r = v[:, t] - (p[:, t].unsqueeze(-1) * seen).sum(-2)
            M = mu[:, t, :, None, None] * M - eta[:, t, :, None, None] * k[:, t].unsqueeze(-1) * r.unsqueeze(-2)
            S = alpha[:, t, :, None, None] * S - beta[:, t, :, None, None] * M
            outputs.append(scale * (q[:, t].unsqueeze(-1) * S).sum(-2))
        finals.append(torch.stack([S, M]))
    o = torch.stack(outputs, dim=1) if outputs else v.clone()
    return o, torch.cat(finals, dim=1)


# ------------------------------------------------------------------------------------------------------- comparison


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over largest value. Stricter than a mean: one wrong entry among many shows."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
    if wanted.numel() == 0:
        return 0.0
    difference = (found.double() - wanted.double()).abs().max().item()
    if difference != difference:
        return float("inf")
    largest = wanted.double().abs().max().item()
    return difference / largest if largest else (0.0 if difference == 0 else float("inf"))


def cotangents(o: Tensor, state: Tensor, seed: int = 99) -> tuple[Tensor, Tensor]:
    """Random gradients to send back through the output and the final state."""
    generator = torch.Generator().manual_seed(seed)
    grads = (torch.randn(x.shape, generator=generator, dtype=torch.float32) for x in (o, state))
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, (o, state)))  # type: ignore[return-value]


def run_with_gradients(
    function: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """o, final state, and the gradient of every input (zeros where nothing depends on it)."""
    o, state = function(inputs)
    pairs = [(x, grad) for x, grad in zip((o, state), cotangents(o, state)) if x.requires_grad]
    results, directions = zip(*pairs)
    grads = torch.autograd.grad(results, list(inputs.values()), directions, materialize_grads=True)
    return o.detach(), state.detach(), dict(zip(inputs, grads))


def errors_against_recurrence(inputs: Inputs, offsets: list[int] | None = None, **options) -> dict[str, float]:
    """Relative errors of o, the final state and every gradient of the torch backend against the float64 recurrence."""
    same = {name: value for name, value in options.items() if name == "scale"}
    boundaries = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    found = run_with_gradients(lambda x: torch_chunk(x, **boundaries, **options), leaves(inputs))
    wanted = run_with_gradients(lambda x: recurrence(**x, offsets=offsets, **same), leaves(inputs, torch.float64))
    errors = {"o": relative_error(found[0], wanted[0]), "final_state": relative_error(found[1], wanted[1])}
    return errors | {f"grad {name}": relative_error(grad, wanted[2][name]) for name, grad in found[2].items()}


def assert_within_bars(errors: dict[str, float], output_bar: float = OUTPUT_BAR, gradient_bar: float = GRADIENT_BAR):
    bars = {name: gradient_bar if name.startswith("grad") else output_bar for name in errors}
    over = {name: f"{error:.2e} > {bars[name]:.0e}" for name, error in errors.items() if not error <= bars[name]}
    assert not over, over

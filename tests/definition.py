"""The rules, written straight from their recurrences, and inputs for them. Everything else is compared with this file.

It shares no code with the package. A rule is one function of a state and a token; ``run`` applies it token by token, in
the dtype of its inputs, so the same lines are the exact answer in float64 and the yardstick of rounding in float32.

Shapes: q, k, p [B, T, H, K]; v, o [B, T, HV, V] (value head j uses key head j // (HV // H)); gates [B, T, HV], vector
decays [B, T, HV, K]; states [N, HV, K, V], or [2, N, HV, K, V] (S, then M) for the momentum rule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

VECTORS = ("q", "k", "v", "p", "r", "a", "b")
GATES = ("log_alpha", "log_mu", "beta", "eta", "direct", "g", "w")
SCALAR_DECAY = ("linear_attn", "simple_gla", "delta_rule", "gated_delta_rule", "comba")
VECTOR_DECAY = ("gla", "kda", "rwkv7")
FIRST_ORDER = SCALAR_DECAY + VECTOR_DECAY
SCALAR_MOMENTUM = ("momentum", "general", "lookahead")
"""general: with a direct write beside the momentum; lookahead: also with the error read where the step would lead"""
VECTOR_MOMENTUM = ("vector", "vector_lookahead")
"""general and lookahead with a decay of S for every key dimension; vector_lookahead has one of M, too"""
MOMENTUM = (*SCALAR_MOMENTUM, *VECTOR_MOMENTUM)
AHEAD = ("lookahead", "vector_lookahead")
RULES = (*MOMENTUM, *FIRST_ORDER)
HARD_ZERO = float("-inf")


# --------------------------------------------------------------------------------------------------- the rules
# x is one token of every row: q, k, p [N, HV, K], v [N, HV, V], gates [N, HV], vector decays [N, HV, K].


def column(x: Tensor) -> Tensor:
    """[..., K] -> [..., K, 1]: a gate for every row of a state."""
    return x.unsqueeze(-1)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of every head."""
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def read(S: Tensor, x: Tensor) -> Tensor:
    """S^T x of every head."""
    return (S * x.unsqueeze(-1)).sum(-2)


def of_rows(gate: Tensor, x: Tensors) -> Tensor:
    """A gate [N, HV], or [N, HV, K] for a number per key dimension, as a factor of a state."""
    return column(gate if gate.dim() == x["k"].dim() else column(gate))


def momentum(state: Tensor, x: Tensors, state_at_probe: Tensor) -> Tensor:
    """state [N, 2, HV, K, V]; the error is read at ``state_at_probe``: S, unless in blocks or looking ahead."""
    S, M = state.unbind(1)
    alpha, mu, beta, eta = (of_rows(x[name], x) for name in ("alpha", "mu", "beta", "eta"))
    write = outer(x["k"], x["v"] - read(state_at_probe, x["p"]))
    M = mu * M - eta * write
    S = alpha * S - beta * M
    if "direct" in x:
        S = S + of_rows(x["direct"], x) * write
    return torch.stack([S, M], 1)


def ahead(state: Tensor, x: Tensors) -> Tensor:
    """Where the step leads if nothing is written: alpha S - beta mu M."""
    S, M = state.unbind(1)
    return of_rows(x["alpha"], x) * S - of_rows(x["beta"], x) * of_rows(x["mu"], x) * M


def linear_attn(S: Tensor, x: Tensors) -> Tensor:
    return S + outer(x["k"], x["v"])


def simple_gla(S: Tensor, x: Tensors) -> Tensor:
    return column(column(x["g"].exp())) * S + outer(x["k"], x["v"])


def delta_rule(S: Tensor, x: Tensors) -> Tensor:
    return S + column(column(x["beta"])) * outer(x["k"], x["v"] - read(S, x["k"]))


def gated_delta_rule(S: Tensor, x: Tensors) -> Tensor:
    """Decays first; the error is read at the decayed state."""
    return delta_rule(column(column(x["g"].exp())) * S, x)


def comba(S: Tensor, x: Tensors) -> Tensor:
    """The error is read along p, before the decay."""
    write = column(column(x["beta"])) * outer(x["k"], x["v"] - read(S, x["p"]))
    return column(column(x["g"].exp())) * S + write


def gla(S: Tensor, x: Tensors) -> Tensor:
    return column(x["g"].exp()) * S + outer(x["k"], x["v"])


def kda(S: Tensor, x: Tensors) -> Tensor:
    return delta_rule(column(x["g"].exp()) * S, x)


def rwkv7(S: Tensor, x: Tensors) -> Tensor:
    return column(x["w"].exp()) * S + outer(x["k"], x["v"]) + outer(x["b"], read(S, x["a"]))


FIRST_ORDER_STEPS: dict[str, Callable[[Tensor, Tensors], Tensor]] = {
    "linear_attn": linear_attn,
    "simple_gla": simple_gla,
    "delta_rule": delta_rule,
    "gated_delta_rule": gated_delta_rule,
    "comba": comba,
    "gla": gla,
    "kda": kda,
    "rwkv7": rwkv7,
}


# ------------------------------------------------------------------------------------------------ whole sequences


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def offsets_of(lengths: list[int] | tuple[int, ...]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def run(step: Callable[[Tensor, Tensors, int], Tensor], tensors: Tensors, state: Tensor, offsets: list[int] | None):
    """States after every token [B, T, ...], and after every sequence [N, ...]; ``state`` [N, ...] is before them."""
    batch, time = tensors["v"].shape[:2]
    spans = [(slice(None), 0, time)]
    if offsets is not None:
        spans = [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairwise(offsets))]
    visited, final = [], []
    for sequences, start, end in spans:
        current = state[sequences]
        for t in range(start, end):
            current = step(current, {name: x[:, t] for name, x in tensors.items()}, t - start)
            visited.append(current)
        final.append(current)
    every = torch.stack(visited, 1) if visited else state.new_zeros(batch, 0, *state.shape[1:])
    return every, torch.cat(final)


def value_heads(tensors: Tensors) -> Tensors:
    """Every vector once per value head."""
    heads = tensors["v"].shape[2]
    return {name: x.repeat_interleave(heads // x.shape[2], 2) if name in VECTORS else x for name, x in tensors.items()}


def momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_mu: Tensor,
    beta: Tensor,
    eta: Tensor,
    p: Tensor | None = None,
    direct: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    offsets: list[int] | None = None,
    l2norm: bool = True,
    p_times_alpha: bool = True,
    lookahead: bool = False,
    block_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """(o, final_state). With blocks, every error is read at the state before the first token of its block."""
    p = k if p is None else p
    if l2norm:
        q, k, p = unit(q), unit(k), unit(p)
    x = value_heads({"q": q, "k": k, "p": p, "v": v})
    x |= {"alpha": log_alpha.exp(), "mu": log_mu.exp(), "beta": beta, "eta": eta}
    if direct is not None:
        x["direct"] = direct
    if p_times_alpha and not lookahead:
        alpha = x["alpha"]
        x["p"] = (alpha if alpha.dim() == x["p"].dim() else alpha.unsqueeze(-1)) * x["p"]
    sequences = v.shape[0] if offsets is None else len(offsets) - 1
    if initial_state is None:
        initial_state = v.new_zeros(2, sequences, v.shape[2], q.shape[3], v.shape[3])
    state_at_probe: list[Tensor] = []

    def step(state: Tensor, token: Tensors, position: int) -> Tensor:
        if position % block_size == 0:
            state_at_probe[:] = [ahead(state, token) if lookahead else state[:, 0]]
        return momentum(state, token, *state_at_probe)

    states, final = run(step, x, initial_state.transpose(0, 1), offsets)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return scale * read(states[:, :, 0], x["q"]), final.transpose(0, 1)


def first_order_rule(
    rule: str,
    tensors: Tensors,
    initial_state: Tensor | None = None,
    initial_z: Tensor | None = None,
    *,
    scale: float | None = None,
    offsets: list[int] | None = None,
    l2norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o, final_state, final_z). Linear attention is normalised by scale q . z + 1e-10 if ``initial_z`` is given:
    z_t = k_1 + ... + k_t, [N, 1, HV, K]."""
    x = value_heads(dict(tensors))
    if l2norm:
        x |= {name: unit(x[name]) for name in ("q", "k", "p") if name in x}
    query = x.pop("r") if rule == "rwkv7" else x.pop("q")
    v = x["v"]
    if initial_state is None:
        sequences = v.shape[0] if offsets is None else len(offsets) - 1
        initial_state = v.new_zeros(sequences, v.shape[2], query.shape[-1], v.shape[-1])
    step = FIRST_ORDER_STEPS[rule]
    states, final = run(lambda S, token, _: step(S, token), x, initial_state, offsets)
    if scale is None:
        scale = 1.0 if rule == "rwkv7" else query.shape[-1] ** -0.5
    o = scale * read(states, query)
    if initial_z is None:
        return o, final, None
    sums, z = run(lambda z, token, _: z + token["k"], x, initial_z[:, 0], offsets)
    return o / (scale * (query * sums).sum(-1, keepdim=True) + 1e-10), final, z.unsqueeze(1)


# ------------------------------------------------------------------------------------------------------- gates
# One table for all rules. Logs of decays have the shape of a gate or of a vector decay; beta and eta are per head.

LADDER = (0.0, -0.1, -0.5, -1.0, -2.0, -3.0, -20.0, HARD_ZERO)


class Draw:
    """Random numbers in float64 from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def scatter(self, x: Tensor, *values: float, share: float) -> Tensor:
        """x with each value at a random share of the places."""
        for value in values:
            x = x.masked_fill(self.uniform(*x.shape) < share, value)
        return x


def constant(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def layer_gates(draw: Draw, shape: tuple[int, ...]) -> Tensors:
    """As the layer bounds them: alpha <= cos^2 th, beta <= sin^2 th with th = atan(eta s), eta in (0, 2)."""
    eta = 2 * draw.uniform(*shape)
    angle = torch.atan(4 * eta * draw.uniform(*shape))
    return {
        "log_alpha": 2 * angle.cos().log() - 0.1 * draw.uniform(*shape),
        "log_mu": -2 * draw.uniform(*shape),
        "beta": angle.sin().square() * draw.uniform(*shape),
        "eta": eta,
    }


def momentum_gates(kind: str, draw: Draw, shape: tuple[int, ...]) -> Tensors:
    """The gates [B, T, HV] that ``kind`` names. Where nothing decays, beta eta stays below 1 as a delta rule needs."""
    gates = layer_gates(draw, shape)
    slow = {"log_alpha": 0.02 * gates["log_alpha"], "log_mu": 0.02 * gates["log_mu"], "beta": 0.5 * gates["beta"]}
    if kind == "layer":
        return gates
    if kind == "ladder":  # each row and head has its own constant mu
        rungs = torch.tensor(LADDER, dtype=torch.float64).repeat(shape[0] * shape[2])[: shape[0] * shape[2]]
        return gates | {"log_mu": rungs.view(shape[0], 1, shape[2]).expand(shape).clone()}
    if kind == "alpha 1":
        return gates | {"log_alpha": constant(shape, 0.0), "beta": 0.5 * gates["beta"]}
    if kind == "nearly 1":
        return gates | {"log_alpha": constant(shape, -1e-7), "log_mu": constant(shape, -1e-4), "beta": slow["beta"]}
    if kind == "alpha 0":
        return gates | {"log_alpha": constant(shape, HARD_ZERO)}
    if kind == "both 0":
        return gates | {"log_alpha": constant(shape, HARD_ZERO), "log_mu": constant(shape, HARD_ZERO)}
    if kind == "beta 0":
        return gates | slow | {"beta": constant(shape, 0.0)}
    if kind == "eta 0":
        return gates | slow | {"eta": constant(shape, 0.0)}
    if kind == "falling mu":  # where a quotient of cumulative products loses every digit
        return gates | {"log_alpha": constant(shape, -1e-3), "log_mu": constant(shape, -3.0), "beta": slow["beta"]}
    if kind == "wide":
        return gates | {"log_mu": -200 * draw.uniform(*shape), "log_alpha": -30 * draw.uniform(*shape) ** 4}
    if kind == "mixed":
        extremes = (HARD_ZERO, -1000.0, -88.0, -20.0, 0.0)
        return {
            "log_alpha": draw.scatter(gates["log_alpha"], *extremes, share=0.06),
            "log_mu": draw.scatter(gates["log_mu"], *extremes, share=0.1),
            "beta": draw.scatter(gates["beta"], 0.0, share=0.2),
            "eta": draw.scatter(gates["eta"], 0.0, 2.0, share=0.1),
        }
    if kind == "weakly damped":  # a write goes on for a hundred tokens
        values = {"log_alpha": -0.01, "log_mu": -0.01, "beta": 1.0, "eta": 2.0}
        return {name: constant(shape, value) for name, value in values.items()}
    if kind == "open":  # an undamped oscillator
        values = {"log_alpha": 0.0, "log_mu": 0.0, "beta": 0.5, "eta": 1.0}
        return {name: constant(shape, value) for name, value in values.items()}
    raise ValueError(f"unknown gates {kind!r}")


def with_channels(gates: Tensors, kind: str, draw: Draw, key_dim: int, names: tuple[str, ...]) -> Tensors:
    """The same kind with a log of its own for every key dimension: what is 0 or a hard zero stays so."""
    gates = dict(gates)
    for name in names:
        logs = gates[name].unsqueeze(-1)
        gates[name] = logs * (1 + draw.uniform(*gates[name].shape, key_dim))
        if kind == "mixed":
            gates[name] = draw.scatter(gates[name], HARD_ZERO, -88.0, -20.0, 0.0, share=0.05)
    return gates


MOMENTUM_GATES = (
    *("layer", "ladder", "alpha 1", "nearly 1", "alpha 0", "both 0", "beta 0", "eta 0"),
    *("falling mu", "wide", "mixed"),
)
FIRST_ORDER_GATES = ("mild", "strong", "mixed", "alpha 1", "alpha 0", "beta 0")


def first_order_gates(
    kind: str, draw: Draw, shape: tuple[int, ...], decay_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """(logs of decays, beta): beta up to 2, so that a transition may have a negative eigenvalue."""
    beta = 2 * draw.uniform(*shape)
    small = draw.uniform(*decay_shape)
    if kind == "mild":
        return -0.1 * small - 1e-3, beta
    if kind == "strong":
        return -20 * small, beta
    if kind == "mixed":
        extremes = (HARD_ZERO, -1000.0, -88.0, -20.0, 0.0)
        return draw.scatter(-0.2 * small, *extremes, share=0.06), draw.scatter(beta, 0.0, 2.0, share=0.1)
    if kind == "alpha 1":
        return torch.zeros_like(small), beta
    if kind == "alpha 0":
        return torch.full_like(small, HARD_ZERO), beta
    if kind == "beta 0":
        return -0.1 * small, torch.zeros_like(beta)
    raise ValueError(f"unknown gates {kind!r}")


# ------------------------------------------------------------------------------------------------------ inputs


def make_keys(kind: str, draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Keys [B, T, H, K]: random, all the same, nearly the same, or the same four again and again."""
    keys = draw.normal(*shape)
    if kind == "random":
        return keys
    if kind == "repeated":
        return keys[:, :1].expand(shape).clone()
    if kind == "nearly repeated":
        return keys[:, :1] + 1e-3 * keys
    if kind == "periodic":
        return keys[:, torch.arange(shape[1]) % 4]
    raise ValueError(f"unknown keys {kind!r}")


KEYS = ("random", "repeated", "nearly repeated", "periodic")


def make_inputs(
    rule: str = "momentum",
    B: int = 2,
    T: int = 65,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int = 24,
    *,
    N: int | None = None,
    gates: str | None = None,
    keys: str = "random",
    with_p: bool = False,
    with_state: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Tensors:
    """The rule's tensors by name, with an initial state of N (default B) sequences.

    q, k and p have any length for the momentum rule, which normalises them; the first-order rules get unit keys.
    """
    draw, HV, N = Draw(seed), HV or H, N or B
    q, k, v = draw.normal(B, T, H, K), make_keys(keys, draw, (B, T, H, K)), draw.normal(B, T, HV, V)
    # A probe near the key, as any sensible one is: along an unrelated one the state would grow without bound.
    p = k + 0.3 * draw.normal(B, T, H, K)
    if rule in MOMENTUM:
        made = momentum_gates(gates or "layer", draw, (B, T, HV))
        if rule in VECTOR_MOMENTUM:
            names = ("log_alpha", "log_mu") if rule in AHEAD else ("log_alpha",)
            made = with_channels(made, gates or "layer", draw, K, names)
        tensors = {"q": q, "k": k, "v": v, **made}
        tensors |= {"p": p} if with_p else {}
        tensors |= {"initial_state": draw.normal(2, N, HV, K, V)} if with_state else {}
        if rule != "momentum":
            tensors["direct"] = draw.scatter(draw.uniform(B, T, HV), 0.0, 1.0, 1.5, share=0.1)
    else:
        tensors = _first_order_inputs(rule, q, k, v, p, gates or "mixed", draw)
        tensors |= {"initial_state": draw.normal(N, HV, K, V)} if with_state else {}
        if with_state and rule == "linear_attn":
            tensors["initial_z"] = draw.uniform(N, 1, HV, K)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: x.to(dtype if name in VECTORS else wide) for name, x in tensors.items()}


def _first_order_inputs(rule: str, q: Tensor, k: Tensor, v: Tensor, p: Tensor, gates: str, draw: Draw) -> Tensors:
    B, T, HV, K = *v.shape[:3], k.shape[-1]
    k = unit(k)
    if rule == "linear_attn":  # positive features, or the normaliser would pass through zero
        return {"q": q.exp(), "k": k.exp(), "v": v}
    shape = (B, T, HV)
    decay, beta = first_order_gates(gates, draw, shape, (*shape, K) if rule in VECTOR_DECAY else shape)
    if rule == "rwkv7":
        kappa = unit(draw.normal(B, T, HV, K))
        return {"r": q, "w": decay, "k": k, "v": v, "a": -kappa, "b": kappa * draw.uniform(B, T, HV, K)}
    named = {"q": q, "k": k, "v": v, "p": 0.9 * unit(p), "g": decay, "beta": beta}
    used = {
        "simple_gla": ("q", "k", "v", "g"),
        "gla": ("q", "k", "v", "g"),
        "delta_rule": ("q", "k", "v", "beta"),
        "gated_delta_rule": ("q", "k", "v", "g", "beta"),
        "comba": ("q", "k", "v", "p", "g", "beta"),
        "kda": ("q", "k", "v", "g", "beta"),
    }[rule]
    return {name: named[name] for name in used}


def converted(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: x.to(dtype) for name, x in tensors.items()}


def leaves(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Copies that ask for gradients."""
    return {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in tensors.items()}


# -------------------------------------------------------------------------------------------------- comparison


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over largest value. Stricter than a mean: one wrong entry among many shows."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    difference = (actual.detach().double() - expected.detach().double()).abs().max().item()
    if difference != difference:
        return float("inf")
    largest = expected.detach().double().abs().max().item()
    return difference / largest if largest else (0.0 if difference == 0 else float("inf"))


def cotangents(*results: Tensor, dtype: torch.dtype | None = None, seed: int = 99) -> list[Tensor]:
    """Random gradients to send back through results; that of the first, the output, is rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float32) for x in results]
    drawn[0] = drawn[0].to(dtype or results[0].dtype)
    return [grad.to(x.dtype) for grad, x in zip(drawn, results)]


def run_with_gradients(
    function: Callable[[Tensors], tuple[Tensor, ...]],
    inputs: Tensors,
    dtype: torch.dtype | None = None,
    around: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensors:
    """The results o, final_state (and final_z), and grad_x of every input x (zeros where nothing depends on it).

    The gradient of o that is sent back has ``dtype`` precision, and is passed through ``around`` first.
    """
    results = function(inputs)
    grad_o, *grad_states = cotangents(*results, dtype=dtype)
    sent = [(x, grad) for x, grad in zip(results, (around(grad_o), *grad_states)) if x.requires_grad]
    outputs, directions = zip(*sent)
    grads = torch.autograd.grad(outputs, list(inputs.values()), directions, materialize_grads=True)
    named = dict(zip(("o", "final_state", "final_z"), (x.detach() for x in results)))
    return named | {f"grad_{name}": grad for name, grad in zip(inputs, grads)}

"""Inputs for the tests of the first-order rules: every rule gets its arguments, by name, from one set of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mdn.ops import first_order

RULES = ("linear_attn", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "comba", "kda", "rwkv7")
ARGUMENTS = {
    "linear_attn": ("q", "k", "v"),
    "simple_gla": ("q", "k", "v", "g"),
    "gla": ("q", "k", "v", "g"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "comba": ("q", "k", "v", "p", "g", "beta"),
    "kda": ("q", "k", "v", "g", "beta"),
    "rwkv7": ("r", "w", "k", "v", "a", "b"),
}
VECTOR = ("gla", "kda", "rwkv7")
GATES = ("mild", "strong", "mixed", "hard zeros", "none")


def chunk(rule: str):
    return getattr(first_order, f"chunk_{rule}")


def recurrent(rule: str):
    return getattr(first_order, f"recurrent_{rule}")


def step(rule: str):
    return getattr(first_order, f"{rule}_step")


def log_decays(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    """Logarithms of decays: near zero, down to -20 a step, both side by side, with -inf among them, or all zero."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    chosen = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "mild":
        return -0.1 * uniform - 1e-3
    if kind == "strong":
        return -20 * uniform
    if kind == "mixed":
        return torch.where(chosen < 0.3, -20 * uniform, -0.05 * uniform)
    if kind == "hard zeros":
        return torch.where(chosen < 0.2, -torch.inf, -uniform)
    return torch.zeros(shape, dtype=torch.float64)


def arguments(
    rule: str,
    B: int = 2,
    T: int = 70,
    H: int = 2,
    HV: int = 2,
    K: int = 8,
    V: int = 6,
    gates: str = "mixed",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The rule's tensors by name: unit keys, betas up to 2, the given kind of decays."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def unit(heads: int) -> Tensor:
        return torch.nn.functional.normalize(normal(B, T, heads, K), dim=-1)

    decay_shape = (B, T, HV, K) if rule in VECTOR else (B, T, HV)
    key, kappa = unit(H), unit(HV)
    tensors = {
        "q": normal(B, T, H, K),
        "k": key,
        "v": normal(B, T, HV, V),
        "p": 0.7 * key + 0.2 * unit(H),  # near k, as in the layer: along an unrelated p the state would grow
        "g": log_decays(decay_shape, gates, generator),
        "beta": 2 * torch.rand(B, T, HV, generator=generator, dtype=torch.float64),
        "a": -kappa,
        "b": kappa * torch.rand(B, T, HV, K, generator=generator, dtype=torch.float64),
    }
    tensors["r"], tensors["w"] = tensors["q"], tensors["g"]
    if rule == "linear_attn":  # positive features, or the normaliser would pass through zero
        tensors["q"], tensors["k"] = tensors["q"].exp(), tensors["k"].exp()
    return {name: tensors[name].to(dtype) for name in ARGUMENTS[rule]}


def random_state(rule: str, N: int, HV: int = 2, K: int = 8, V: int = 6, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(7)
    state = torch.randn(N, HV, K, V, generator=generator, dtype=torch.float64).to(dtype)
    if rule != "linear_attn":
        return state
    return state, torch.rand(N, 1, HV, K, generator=generator, dtype=torch.float64).to(dtype)


def flat(state) -> Tensor:
    """A state as one tensor: linear attention's comes with its normaliser."""
    if isinstance(state, tuple):
        return torch.cat([state[0].flatten(1), state[1].flatten(1)], 1)
    return state.flatten(1)

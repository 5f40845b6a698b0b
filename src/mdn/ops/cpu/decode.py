"""One token per sequence, the states updated in place (decode).

q, k, p ``[B, H, K]``, v ``[B, HV, V]``, gates ``[B, HV]``, states ``[slots, HV, K, V]``
with a contiguous last dimension.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from mdn.ops.cpu.arguments import Options, address, check_heads, check_result, io_dtype, optional_values, values
from mdn.ops.cpu.library import Step, library

SMALL = 1 << 16
"""state elements below which one thread is fastest"""


def step_(q, k, v, p, log_alpha, log_mu, beta, eta, S, M, state_indices, options) -> Tensor:
    """One token of the momentum delta rule; S and M change in place, o ``[B, HV, V]`` is returned."""
    return _step(
        q,
        k,
        v,
        p,
        {"log_alpha": log_alpha, "log_mu": log_mu, "beta": beta, "eta": eta},
        S,
        M,
        state_indices,
        options,
        True,
    )


def first_order_step_(q, k, v, p, log_alpha, beta, S, state_indices, options, erase: bool = True) -> Tensor:
    """One token of a first-order rule; S changes in place."""
    return _step(q, k, v, p, {"log_alpha": log_alpha, "beta": beta}, S, None, state_indices, options, erase)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    gates: dict[str, Tensor | None],
    state: Tensor,
    momentum: Tensor | None,
    state_indices: Tensor | None,
    options: Options,
    erase: bool,
) -> Tensor:
    batch, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[-2:]
    check_heads(key_heads, value_heads)
    dtype = io_dtype(q)
    slots = state.shape[0]
    states = {"S": state} if momentum is None else {"S": state, "M": momentum}
    for name, x in states.items():
        _check_state(name, x, (slots, value_heads, key_dim, value_dim))
    keys = (batch, key_heads, key_dim)
    tensors: dict[str, Tensor | None] = {
        "q": values("q", q, dtype, keys),
        "k": values("k", k, dtype, keys),
        "p": optional_values("p", p, dtype, keys) if erase else None,
        "v": values("v", v, dtype, (batch, value_heads, value_dim)),
        "slots": None if state_indices is None else _slots(state_indices, batch),
        "o": torch.empty((batch, value_heads, value_dim), dtype=dtype),
    }
    for name, gate in gates.items():
        tensors[name] = optional_values(name, gate, torch.float32, (batch, value_heads))
    step = Step(
        batch, slots, key_heads, value_heads, key_dim, value_dim, 1, dtype == torch.bfloat16, options.l2norm,
        options.p_times_alpha, momentum is not None, erase, options.scale,
    )  # fmt: skip
    for name, tensor in tensors.items():
        setattr(step, name, address(tensor))
    step.state, step.state_strides[:] = state.data_ptr(), state.stride()[:3]
    if momentum is not None:
        step.momentum, step.momentum_strides[:] = momentum.data_ptr(), momentum.stride()[:3]
    if batch * value_heads * key_dim * value_dim >= SMALL:
        step.threads = torch.get_num_threads()
    check_result(library().mdn_step(byref(step)))
    o = tensors["o"]
    assert o is not None
    return o.to(v.dtype)


def _check_state(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"{name} must be a float32 CPU tensor for the native CPU kernel, got {x.dtype} on {x.device}")
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")


def _slots(state_indices: Tensor, batch: int) -> Tensor:
    if state_indices.shape != (batch,) or state_indices.device.type != "cpu":
        raise ValueError(f"state_indices must be a CPU tensor of shape [{batch}], got {list(state_indices.shape)}")
    return state_indices.to(torch.int64).contiguous()

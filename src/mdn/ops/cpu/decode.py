"""One token per sequence, the states updated in place (decode).

q, k, p ``[B, H, K]``, v ``[B, HV, V]``, gates ``[B, HV]``, states ``[slots, HV, K, V]``
with a contiguous last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import cast

import torch
from torch import Tensor

from mdn.ops.cpu.arguments import check_heads, check_result, io_dtype, optional_values, values
from mdn.ops.cpu.library import Step, library
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState

GATES = ("log_alpha", "log_mu", "beta", "eta")
ADDRESSES = ("q", "k", "v", "p", *GATES, "state", "momentum", "slots")
SMALL = 1 << 16
"""state elements below which one thread is fastest"""


Tensors = tuple[Tensor | None, ...]
"""q, k, v, p, log_alpha, log_mu, beta, eta, S, M, state_indices"""


def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
    """One token of the momentum delta rule; S and M change in place, o ``[B, HV, V]`` is returned."""
    return _step(_flat(tensors, state), options)


def first_order_step_(q, k, v, p, log_alpha, beta, S, state_indices, options, erase: bool = True) -> Tensor:
    """One token of a first-order rule; S changes in place."""
    return _step((q, k, v, p, log_alpha, None, beta, None, S, None, state_indices), options, erase)


def prepared_step(
    tensors: RuleTensors, state: StepState, options: RuleOptions
) -> Callable[[RuleTensors, StepState], Tensor] | None:
    """The step for all further tensors of these shapes, strides and dtypes, without checking them again; None if they
    would have to be converted."""
    flat = _flat(tensors, state)
    call = _Call(flat, options, True)
    if any(x is not y for x, y in zip(call.converted(flat), flat)):
        return None
    return lambda tensors, state: call((*tensors[:8], *state))


def prepared_first_order_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor | None,
    beta: Tensor | None,
    S: Tensor,
    state_indices: Tensor | None,
    options: RuleOptions,
    erase: bool,
) -> Callable[..., Tensor] | None:
    """The same for ``first_order_step_``: a function of its eight tensors."""
    flat = (q, k, v, p, log_alpha, None, beta, None, S, None, state_indices)
    call = _Call(flat, options, erase)
    if any(x is not y for x, y in zip(call.converted(flat), flat)):
        return None
    return lambda q, k, v, p, log_alpha, beta, S, slots: call((q, k, v, p, log_alpha, None, beta, None, S, None, slots))


def _flat(tensors: RuleTensors, state: StepState) -> Tensors:
    return (*tensors[:8], *state)


def _step(tensors: Tensors, options: RuleOptions, erase: bool = True) -> Tensor:
    call = _Call(tensors, options, erase)
    o = call(call.converted(tensors))
    dtype = cast(Tensor, tensors[2]).dtype
    return o if o.dtype == dtype else o.to(dtype)


class _Call:
    """The C struct of a step, but for the addresses."""

    def __init__(self, tensors: Tensors, options: RuleOptions, erase: bool):
        q, v, state = (cast(Tensor, tensors[place]) for place in (0, 2, 8))
        momentum = tensors[9]
        batch, key_heads, key_dim = q.shape
        value_heads, value_dim = v.shape[-2:]
        check_heads(key_heads, value_heads)
        shape = (state.shape[0], value_heads, key_dim, value_dim)
        _check_state("S", state, shape)
        if momentum is not None:
            _check_state("M", momentum, shape)
        self.dtype = io_dtype(q)
        self.keys, self.rows, self.outputs = q.shape, (batch, value_heads), (batch, value_heads, value_dim)
        self.erase, self.small = erase, batch * value_heads * key_dim * value_dim < SMALL
        step = Step(
            batch, state.shape[0], key_heads, value_heads, key_dim, value_dim, 1, self.dtype == torch.bfloat16,
            options.l2norm, options.p_times_alpha, momentum is not None, erase, options.scale,
        )  # fmt: skip
        step.state_strides = state.stride()[:3]
        if momentum is not None:
            step.momentum_strides = momentum.stride()[:3]
        self.template = bytes(step)

    def converted(self, tensors: Tensors) -> Tensors:
        """As the kernel reads them. What is not read is None."""
        q, k, v = (cast(Tensor, x) for x in tensors[:3])
        p, *gates, state, momentum, indices = tensors[3:]
        return (
            values("q", q, self.dtype, self.keys),
            values("k", k, self.dtype, self.keys),
            values("v", v, self.dtype, self.outputs),
            optional_values("p", p, self.dtype, self.keys) if self.erase else None,
            *(optional_values(name, gate, torch.float32, self.rows) for name, gate in zip(GATES, gates)),
            state,
            momentum,
            None if indices is None else _slots(indices, self.rows[0]),
        )

    def __call__(self, tensors: Tensors) -> Tensor:
        step = Step.from_buffer_copy(self.template)
        o = torch.empty(self.outputs, dtype=self.dtype)
        for name, x in zip(ADDRESSES, tensors):
            if x is not None:
                setattr(step, name, x.data_ptr())
        step.o = o.data_ptr()
        if not self.small:
            step.threads = torch.get_num_threads()
        check_result(library().mdn_step(byref(step)))
        return o


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

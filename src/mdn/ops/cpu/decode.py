"""One token per sequence, the states updated in place (decode).

q, k, p ``[B, H, K]``, v ``[B, HV, V]``, gates ``[B, HV]``, states ``[slots, HV, K, V]``, whose last dimension is
contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mdn.ops.cpu.bindings import Step, call, check_heads, io_dtype, optional_values, values
from mdn.ops.momentum.interface import RuleOptions, RuleTensors, StepState

if TYPE_CHECKING:
    from mdn.ops.first_order.inputs import FirstOrderTensors

SMALL = 1 << 16
"""state elements below which one thread is fastest"""


class StepTensors(NamedTuple):
    """The tensors of one step of either family of rules, under the names of the C struct; no M: no momentum. Their
    order is that of ``RuleTensors`` and ``StepState``."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    log_alpha: Tensor | None
    log_mu: Tensor | None
    beta: Tensor | None
    eta: Tensor | None
    direct: Tensor | None
    S: Tensor
    M: Tensor | None
    slots: Tensor | None


FIELDS = StepTensors._fields


def of_first_order(tensors: FirstOrderTensors, S: Tensor, slots: Tensor | None) -> StepTensors:
    q, k, v, p, log_alpha, beta, _ = tensors
    return StepTensors(q, k, v, p, log_alpha, None, beta, None, None, S, None, slots)


def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
    """One token of the momentum delta rule; S and M change in place, o ``[B, HV, V]`` is returned."""
    return _step(StepTensors(*tensors.of_tokens, *state), options, erase=True)


def first_order_step_(
    tensors: FirstOrderTensors, S: Tensor, slots: Tensor | None, options: RuleOptions, erase: bool
) -> Tensor:
    """One token of a first-order rule without an erase key; S changes in place. ``erase`` False means p = 0."""
    return _step(of_first_order(tensors, S, slots), options, erase)


def prepared_step(
    tensors: RuleTensors, state: StepState, options: RuleOptions
) -> Callable[[RuleTensors, StepState], Tensor] | None:
    """The step for all further tensors of these shapes, strides and dtypes, without checking them again; None if they
    would have to be converted."""
    prepared = _prepared(StepTensors(*tensors.of_tokens, *state), options, erase=True)
    if prepared is None:
        return None
    return lambda tensors, state: prepared.run(
        tensors.v, (*tensors.of_tokens, *state)
    )  # a plain tuple is faster to make


def prepared_first_order_step(
    tensors: FirstOrderTensors, S: Tensor, slots: Tensor | None, options: RuleOptions, erase: bool
) -> Callable[[FirstOrderTensors, Tensor, Tensor | None], Tensor] | None:
    """The same for ``first_order_step_``."""
    prepared = _prepared(of_first_order(tensors, S, slots), options, erase)
    if prepared is None:
        return None
    return lambda tensors, S, slots: prepared.run(tensors.v, of_first_order(tensors, S, slots))


def _prepared(given: StepTensors, options: RuleOptions, erase: bool) -> PreparedStep | None:
    prepared = PreparedStep(given, options, erase)
    return prepared if all(x is y for x, y in zip(prepared.converted(given), given)) else None


def _step(given: StepTensors, options: RuleOptions, erase: bool) -> Tensor:
    prepared = PreparedStep(given, options, erase)
    converted = prepared.converted(given)
    return prepared.run(converted.v, converted).to(given.v.dtype)


class PreparedStep:
    """The C struct of a step, complete but for the addresses."""

    def __init__(self, tensors: StepTensors, options: RuleOptions, erase: bool):
        q, v, S, M = tensors.q, tensors.v, tensors.S, tensors.M
        batch, key_heads, key_dim = q.shape
        value_heads, value_dim = v.shape[-2:]
        check_heads(key_heads, value_heads)
        state_shape = (S.shape[0], value_heads, key_dim, value_dim)
        check_state("S", S, state_shape)
        if M is not None:
            check_state("M", M, state_shape)
        self.erase = erase
        self.dtype = io_dtype(q)
        self.key_shape, self.gate_shape, self.value_shape = q.shape, v.shape[:-1], v.shape
        first = FIELDS.index("S")
        self.states = slice(first, first + (1 if M is None else 2))
        self.is_small = batch * value_heads * key_dim * value_dim < SMALL
        struct = Step(
            batch=batch,
            slot_count=S.shape[0],
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            threads=1,
            bfloat16=self.dtype == torch.bfloat16,
            l2norm=options.l2norm,
            p_times_alpha=options.p_times_alpha,
            lookahead=options.lookahead,
            has_momentum=M is not None,
            has_erase=erase,
            scale=options.scale,
            S_strides=S.stride()[:3],
        )
        if M is not None:
            struct.M_strides = M.stride()[:3]
        self.template = bytes(struct)

    def converted(self, tensors: StepTensors) -> StepTensors:
        """As the kernel reads them. What is not read is None."""
        gates = {
            name: optional_values(name, getattr(tensors, name), torch.float32, self.gate_shape)
            for name in ("log_alpha", "log_mu", "beta", "eta", "direct")
        }
        return StepTensors(
            q=values("q", tensors.q, self.dtype, self.key_shape),
            k=values("k", tensors.k, self.dtype, self.key_shape),
            v=values("v", tensors.v, self.dtype, self.value_shape),
            p=optional_values("p", tensors.p, self.dtype, self.key_shape) if self.erase else None,
            **gates,
            S=tensors.S,
            M=tensors.M,
            slots=None if tensors.slots is None else _check_slots(tensors.slots, self.key_shape[0]),
        )

    def run(self, v: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """``tensors``: the fields of ``StepTensors``, which need no conversion; v is also what o looks like."""
        struct = Step.from_buffer_copy(self.template)
        o = torch.empty_like(v)  # half the time of torch.empty
        for name, x in zip(FIELDS, tensors):
            if x is not None:
                setattr(struct, name, x.data_ptr())
        struct.o = o.data_ptr()
        if not self.is_small:
            struct.threads = torch.get_num_threads()
        call("mdn_step", struct, changed=tensors[self.states])
        return o


def check_state(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"{name} must be a float32 CPU tensor for the native CPU kernel, got {x.dtype} on {x.device}")
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")


def _check_slots(state_indices: Tensor, batch: int) -> Tensor:
    if state_indices.shape != (batch,) or state_indices.device.type != "cpu":
        raise ValueError(f"state_indices must be a CPU tensor of shape [{batch}], got {list(state_indices.shape)}")
    return state_indices.to(torch.int64).contiguous()

"""Forward and backward over whole sequences: fills in the kernel's arguments, adds up what it returns in parts.

Shapes as in docs/architecture.md. Batched ``[B, T, ...]`` input goes over as one row of B sequences.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.cpu.arguments import address, check_heads, check_result, io_dtype, optional_values, values
from mdn.ops.cpu.library import Problem, library
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors

SMALL = 2_000_000
"""multiply-adds below which waking other threads costs more than it saves"""


@dataclass
class Call:
    """One call's tensors (kept alive while the kernel runs) and the struct that points at them."""

    problem: Problem
    dtype: torch.dtype
    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int
    kept: list

    @property
    def parts(self) -> int:
        return self.value_heads * self.problem.slices

    @property
    def value_shape(self) -> tuple[int, ...]:
        return self.batch, self.time, self.value_heads, self.value_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.sequences, self.value_heads, self.key_dim, self.value_dim

    def give(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            setattr(self.problem, name, address(tensor))
        self.kept.append(tensors)

    def give_state(self, state: str, momentum: str, x: Tensor | None) -> None:
        """A state ``[2, N, HV, K, V]`` (S, then M), or ``[N, HV, K, V]`` when there is no momentum."""
        if x is not None and self.problem.has_momentum:
            self.give(**{state: x[0], momentum: x[1]})
        else:
            self.give(**{state: x})


def _start(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    gates: dict[str, Tensor | None],
    initial_state: Tensor | None,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
    erase: bool,
) -> Call:
    """Checks and fills in everything that forward and backward share. ``gates`` has log_mu iff there is momentum."""
    batch, time, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[-2:]
    check_heads(key_heads, value_heads)
    dtype = io_dtype(q)
    if boundaries is None:
        offsets = [row * time for row in range(batch + 1)]
    else:
        offsets = list(boundaries.offsets)
        if offsets[0] != 0 or offsets[-1] != batch * time:
            raise ValueError(f"cu_seqlens must cover all {batch * time} tokens, but it ends at {offsets[-1]}")
    problem = Problem(sequences=len(offsets) - 1, key_heads=key_heads, value_heads=value_heads, slices=1)
    problem.key_dim, problem.value_dim, problem.scale = key_dim, value_dim, options.scale
    problem.bfloat16, problem.l2norm = dtype == torch.bfloat16, options.l2norm
    problem.p_times_alpha, problem.has_momentum, problem.has_erase = options.p_times_alpha, "log_mu" in gates, erase
    problem.chunk = _chunk(key_dim, options.chunk_size)
    call = Call(problem, dtype, batch, time, key_heads, value_heads, key_dim, value_dim, len(offsets) - 1, [])
    longest = max((end - start for start, end in pairwise(offsets)), default=0)
    problem.threads, problem.slices = _division(call, longest)
    keys = (batch, time, key_heads, key_dim)
    packed_offsets = (c_int64 * len(offsets))(*offsets)
    call.kept.append(packed_offsets)
    problem.offsets = addressof(packed_offsets)
    call.give(q=values("q", q, dtype, keys), k=values("k", k, dtype, keys), v=values("v", v, dtype, call.value_shape))
    call.give(p=optional_values("p", p, dtype, keys) if erase else None)
    per_token = (batch, time, value_heads)
    call.give(**{name: optional_values(name, gate, torch.float32, per_token) for name, gate in gates.items()})
    call.give_state("initial_state", "initial_momentum", _state(call, "initial_state", initial_state))
    return call


def _state(call: Call, name: str, x: Tensor | None) -> Tensor | None:
    stacked = (2, *call.state_shape) if call.problem.has_momentum else call.state_shape
    return optional_values(name, x, torch.float32, stacked)


def _chunk(key_dim: int, asked: int) -> int:
    """The kernel's chunk: a multiple of 16 from 16 to 128, at most what was asked for; larger ones never win."""
    fastest = 64 if key_dim >= 128 else 32
    return max(16, min(fastest, asked) // 16 * 16)


def _division(call: Call, longest: int) -> tuple[int, int]:
    """(threads, slices of each value head): enough equal pieces of work to keep every thread busy.

    Slices repeat the work that does not depend on V, so they are made only where heads and sequences do not suffice.
    """
    tokens = call.batch * call.time
    threads = torch.get_num_threads()
    if tokens * call.value_heads * call.key_dim * call.value_dim * 6 < SMALL or longest == 0:
        return 1, 1
    units = call.value_heads * tokens / longest
    chunk, key_dim, value_dim = call.problem.chunk, call.key_dim, call.value_dim

    def time_with(slices: int) -> float:
        per_unit = 2 * chunk * key_dim + 6 * key_dim * value_dim / slices + chunk * value_dim / slices
        return -(-units * slices // threads) * per_unit

    possible = [s for s in range(1, value_dim // 32 + 1) if value_dim % (16 * s) == 0] or [1]
    return threads, min(possible, key=time_with)


def _forward(call: Call, save_residual: bool) -> tuple[Tensor, Tensor, Tensor]:
    o = torch.empty(call.value_shape, dtype=call.dtype)
    residual = torch.empty(call.value_shape if save_residual else 0, dtype=torch.float32)
    stacked = (2, *call.state_shape) if call.problem.has_momentum else call.state_shape
    final_state = torch.empty(stacked, dtype=torch.float32)
    call.give(o=o, residual=residual if save_residual else None)
    call.give_state("final_state", "final_momentum", final_state)
    check_result(library().mdn_forward(byref(call.problem)))
    return o, final_state, residual


@dataclass
class Gradients:
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    gates: dict[str, Tensor | None]
    initial_state: Tensor | None


def _backward(
    call: Call,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    residual: Tensor,
    gates: dict[str, Tensor | None],
    wants: tuple[bool, bool],
) -> Gradients:
    """``wants``: (gradient of p, gradient of the initial state)."""
    call.give(grad_o=values("grad_o", grad_o, call.dtype, call.value_shape))
    call.give(residual=values("residual", residual, torch.float32, call.value_shape))
    call.give_state("grad_final_state", "grad_final_momentum", _state(call, "grad_final_state", grad_final_state))
    in_parts = call.parts != call.key_heads
    call.problem.float32_key_gradient = in_parts
    per_part = (call.batch, call.time, call.parts)
    key_dtype = torch.float32 if in_parts else call.dtype
    dq, dk, dp = (
        torch.empty((*per_part, call.key_dim), dtype=key_dtype) if w else None for w in (True, True, wants[0])
    )
    dv = torch.empty(call.value_shape, dtype=call.dtype)
    dgates = {name: None if gate is None else torch.empty(per_part) for name, gate in gates.items()}
    stacked = (2, *call.state_shape) if call.problem.has_momentum else call.state_shape
    dinitial = torch.empty(stacked) if wants[1] else None
    call.give(dq=dq, dk=dk, dp=dp, dv=dv, **{f"d{name}": gradient for name, gradient in dgates.items()})
    call.give_state("dinitial_state", "dinitial_momentum", dinitial)
    check_result(library().mdn_backward(byref(call.problem)))
    dq, dk, dp = (_joined(x, call.key_heads) for x in (dq, dk, dp))
    assert dq is not None
    assert dk is not None
    return Gradients(dq, dk, dv, dp, {name: _joined(x, call.value_heads) for name, x in dgates.items()}, dinitial)


def _joined(x: Tensor | None, heads: int) -> Tensor | None:
    """``[B, T, parts, ...]`` added up to ``[B, T, heads, ...]``."""
    if x is None or x.shape[2] == heads:
        return x
    return x.unflatten(2, (heads, x.shape[2] // heads)).sum(3)


def _like(x: Tensor | None, given: Tensor | None) -> Tensor | None:
    return None if x is None or given is None else x.to(given.dtype)


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    """The forward pass of a backend, as `mdn.ops.momentum.interface` describes it."""
    q, k, v, p, *_, initial_state = tensors
    call = _start(q, k, v, p, _gates(tensors), initial_state, boundaries, options, True)
    o, final_state, residual = _forward(call, save_residual)
    return ForwardResult(o.to(v.dtype), final_state, residual)


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    """Gradients of all inputs, as `mdn.ops.momentum.interface` describes them."""
    q, k, v, p, *_, initial_state = tensors
    gates = _gates(tensors)
    call = _start(q, k, v, p, gates, initial_state, boundaries, options, True)
    wants = p is not None, initial_state is not None
    d = _backward(call, grad_o, grad_final_state, residual, gates, wants)
    found = RuleTensors(d.q, d.k, d.v, d.p, **d.gates, initial_state=d.initial_state)  # type: ignore[arg-type]
    return RuleTensors(*(_like(gradient, given) for gradient, given in zip(found, tensors)))  # type: ignore[arg-type]


def _gates(tensors: RuleTensors) -> dict[str, Tensor | None]:
    return {name: getattr(tensors, name) for name in ("log_alpha", "log_mu", "beta", "eta")}


def first_order_forward(
    q, k, v, p, log_alpha, beta, initial_state, boundaries, options, save_residual, erase: bool = True
):
    """-> (o, final_state [N, HV, K, V], residual); see the package's docstring."""
    gates = {"log_alpha": log_alpha, "beta": beta}
    call = _start(q, k, v, p, gates, initial_state, boundaries, options, erase)
    o, final_state, residual = _forward(call, save_residual)
    return o.to(v.dtype), final_state, residual


def first_order_backward(
    grad_o,
    grad_final_state,
    q,
    k,
    v,
    p,
    log_alpha,
    beta,
    initial_state,
    residual,
    boundaries,
    options,
    erase: bool = True,
):
    """-> (dq, dk, dv, dp | None, dlog_alpha | None, dbeta | None, dinitial_state | None)."""
    gates = {"log_alpha": log_alpha, "beta": beta}
    call = _start(q, k, v, p, gates, initial_state, boundaries, options, erase)
    wants = p is not None and erase, initial_state is not None
    d = _backward(call, grad_o, grad_final_state, residual, gates, wants)
    of_gates = (_like(d.gates[name], gate) for name, gate in gates.items())
    return d.q.to(q.dtype), d.k.to(k.dtype), d.v.to(v.dtype), _like(d.p, p), *of_gates, d.initial_state

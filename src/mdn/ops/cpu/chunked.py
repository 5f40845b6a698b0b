"""Forward and backward over whole sequences: fills in the kernel's arguments, adds up what it returns in parts.

Shape letters as in ``mdn.ops.momentum.interface``. Batched ``[B, T, ...]`` input goes over as one row of B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.cpu.bindings import (
    Problem,
    call,
    check_heads,
    io_dtype,
    optional_values,
    point,
    point_at_offsets,
    values,
)
from mdn.ops.momentum.interface import ACCURATE_CHUNK, ForwardResult, RuleOptions, RuleTensors

SMALL = 2_000_000
"""multiply-adds below which waking other threads costs more than it saves"""
GATES = ("log_alpha", "log_mu", "beta", "eta", "direct")


class KernelTensors(NamedTuple):
    """``RuleTensors``, or their gradients, of either family of rules, in the same order: without ``log_mu`` there is no
    momentum and the initial state is ``[N, HV, K, V]``; ``direct`` None means zeros, other gates that are None are
    ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None = None
    log_alpha: Tensor | None = None
    log_mu: Tensor | None = None
    beta: Tensor | None = None
    eta: Tensor | None = None
    direct: Tensor | None = None
    initial_state: Tensor | None = None


@dataclass
class ShapedProblem:
    """The kernel's struct of one pass, and the shapes of the tensors that it points at."""

    problem: Problem
    batch: int
    time: int
    dtype: torch.dtype
    """of q, k, v, p, o and their gradients inside the kernel"""

    @property
    def parts(self) -> int:
        return int(self.problem.value_heads * self.problem.slices)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return self.batch, self.time, self.problem.key_heads, self.problem.key_dim

    @property
    def value_shape(self) -> tuple[int, ...]:
        return self.batch, self.time, self.problem.value_heads, self.problem.value_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        problem = self.problem
        shape = problem.sequences, problem.value_heads, problem.key_dim, problem.value_dim
        return (2, *shape) if problem.has_momentum else shape

    def point_at_state(self, name: str, x: Tensor | None) -> None:
        """A state of ``state_shape``: S and M, or S alone."""
        if x is not None and self.problem.has_momentum:
            point(self.problem, **{f"{name}_S": x[0], f"{name}_M": x[1]})
        else:
            point(self.problem, **{f"{name}_S": x})


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    """The forward pass of a backend, as ``mdn.ops.momentum.interface`` describes it."""
    return kernel_forward(KernelTensors(*tensors), boundaries, options, save_residual, erase=True)


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    """Gradients of all inputs, as ``mdn.ops.momentum.interface`` describes them."""
    given = KernelTensors(*tensors)
    gradients = kernel_backward(grad_o, grad_final_state, given, residual, boundaries, options, erase=True)
    return RuleTensors(*gradients)  # type: ignore[arg-type]  # the gates of RuleTensors are never None


def kernel_forward(
    tensors: KernelTensors,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
    save_residual: bool,
    erase: bool,
) -> ForwardResult:
    """Either family; ``erase`` False means p = 0: nothing is subtracted from v."""
    shaped = _shaped_problem(tensors, boundaries, options, erase)
    problem, value_shape = shaped.problem, shaped.value_shape
    o = _new(value_shape if options.outputs else (0,), shaped.dtype)
    residual = _new(value_shape if save_residual else (0,))
    final_state = _new(shaped.state_shape)
    point(problem, o=o if options.outputs else None, residual=residual if save_residual else None)
    shaped.point_at_state("final", final_state)
    call("mdn_forward", problem)
    return ForwardResult(o.to(tensors.v.dtype), final_state, residual)


def kernel_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: KernelTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
    erase: bool,
) -> KernelTensors:
    """Gradients of all tensors of either family, None where there is none."""
    shaped = _shaped_problem(tensors, boundaries, options, erase)
    problem, dtype, value_shape = shaped.problem, shaped.dtype, shaped.value_shape
    point(
        problem,
        grad_o=values("grad_o", grad_o, dtype, value_shape),
        residual=values("residual", residual, torch.float32, value_shape),
    )
    grad_final_state = optional_values("grad_final_state", grad_final_state, torch.float32, shaped.state_shape)
    shaped.point_at_state("grad_final", grad_final_state)

    # One gradient of q, k, p and the gates per part; parts are added up below, in float32.
    in_parts = shaped.parts != problem.key_heads
    problem.float32_key_gradient = in_parts
    key_dtype = torch.float32 if in_parts else dtype
    per_part = (shaped.batch, shaped.time, shaped.parts)
    key_shape = (*per_part, problem.key_dim)
    grad = KernelTensors(
        q=_new(key_shape, key_dtype),
        k=_new(key_shape, key_dtype),
        v=_new(value_shape, dtype),
        p=_new(key_shape, key_dtype) if erase and tensors.p is not None else None,
        **{name: None if getattr(tensors, name) is None else _new(per_part) for name in GATES},
        initial_state=None if tensors.initial_state is None else _new(shaped.state_shape),
    )
    point(problem, **{f"grad_{name}": getattr(grad, name) for name in ("q", "k", "v", "p", *GATES)})
    shaped.point_at_state("grad_initial", grad.initial_state)
    call("mdn_backward", problem)
    H, HV = problem.key_heads, problem.value_heads
    gates = {name: _added_up_like(getattr(tensors, name), getattr(grad, name), HV) for name in GATES}
    return KernelTensors(
        q=_added_up(grad.q, H).to(tensors.q.dtype),
        k=_added_up(grad.k, H).to(tensors.k.dtype),
        v=grad.v.to(tensors.v.dtype),
        p=_added_up_like(tensors.p, grad.p, H),
        **gates,
        initial_state=_added_up_like(tensors.initial_state, grad.initial_state),
    )


def _shaped_problem(
    tensors: KernelTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, erase: bool
) -> ShapedProblem:
    """Checks and fills in everything that forward and backward share."""
    batch, time, key_heads, key_dim = tensors.q.shape
    value_heads, value_dim = tensors.v.shape[-2:]
    check_heads(key_heads, value_heads)
    dtype = io_dtype(tensors.q)
    offsets = offsets_of(boundaries, batch, time)
    problem = Problem(
        sequences=len(offsets) - 1,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk_size=_chunk_size(key_dim, options.chunk_size, tensors.log_mu is not None),
        bfloat16=dtype == torch.bfloat16,
        l2norm=options.l2norm,
        p_times_alpha=options.p_times_alpha,
        lookahead=options.lookahead,
        has_momentum=tensors.log_mu is not None,
        has_erase=erase,
        scale=options.scale,
    )
    longest = max((end - start for start, end in pairwise(offsets)), default=0)
    problem.threads, problem.slices = _division(problem, batch * time, longest)
    shaped = ShapedProblem(problem, batch, time, dtype)
    point_at_offsets(problem, offsets)
    point(
        problem,
        q=values("q", tensors.q, dtype, shaped.key_shape),
        k=values("k", tensors.k, dtype, shaped.key_shape),
        v=values("v", tensors.v, dtype, shaped.value_shape),
        p=optional_values("p", tensors.p, dtype, shaped.key_shape) if erase else None,
    )
    for name in GATES:
        gate = optional_values(name, getattr(tensors, name), torch.float32, shaped.value_shape[:3])
        point(problem, **{name: gate})
    initial_state = optional_values("initial_state", tensors.initial_state, torch.float32, shaped.state_shape)
    shaped.point_at_state("initial", initial_state)
    return shaped


def _new(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that the kernel writes: of the dtype and the device that it knows, whatever torch's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def offsets_of(boundaries: SequenceBoundaries | None, batch: int, time: int) -> list[int]:
    """Where the sequences begin in one row of all tokens, and where the last one ends."""
    if boundaries is None:
        return [row * time for row in range(batch + 1)]
    offsets = list(boundaries.offsets)
    if offsets[0] != 0 or offsets[-1] != batch * time:
        raise ValueError(f"cu_seqlens must cover all {batch * time} tokens, but it ends at {offsets[-1]}")
    return offsets


def _chunk_size(key_dim: int, requested: int, has_momentum: bool) -> int:
    """The kernel's chunk: the fastest one, or a smaller one that was requested.

    16 or less requests accuracy, see `ACCURATE_CHUNK`; without momentum 16 is small enough.
    """
    if requested <= 16:
        return ACCURATE_CHUNK if has_momentum else 16
    return min(64 if key_dim >= 128 else 32, requested // 16 * 16)


def _division(problem: Problem, tokens: int, longest: int) -> tuple[int, int]:
    """(threads, slices of each value head): enough equal pieces of work to keep every thread busy.

    Slices repeat the work that does not depend on V, so they are made only where heads and sequences do not suffice.
    """
    threads = torch.get_num_threads()
    heads, key_dim, value_dim, chunk = problem.value_heads, problem.key_dim, problem.value_dim, problem.chunk_size
    if tokens * heads * key_dim * value_dim * 6 < SMALL or longest == 0:
        return 1, 1
    units = heads * tokens / longest

    def time_with(slices: int) -> float:
        per_unit = 2 * chunk * key_dim + 6 * key_dim * value_dim / slices + chunk * value_dim / slices
        return float(-(-units * slices // threads) * per_unit)

    possible = [s for s in range(1, value_dim // 32 + 1) if value_dim % (16 * s) == 0] or [1]
    return threads, min(possible, key=time_with)


def _added_up(x: Tensor, heads: int) -> Tensor:
    """``[B, T, parts, ...]`` added up to ``[B, T, heads, ...]``."""
    if x.shape[2] == heads:
        return x
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, *x.shape[3:]).sum(3)


def _added_up_like(given: Tensor | None, x: Tensor | None, heads: int | None = None) -> Tensor | None:
    """The same in the dtype of the input, None where there is none."""
    if given is None or x is None:
        return None
    return (x if heads is None else _added_up(x, heads)).to(given.dtype)

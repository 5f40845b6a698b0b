"""First-order rules whose state decays by one number per head and token, chunk by chunk: in torch and natively.

    r_t = v_t - S_{t-1}^T p_t                          no p: r_t = v_t
    S_t = alpha_t S_{t-1} + beta_t k_t r_t^T           o_t = S_t^T q_t

With p = alpha k this is the gated delta rule, with another p Comba, without p Mamba2's state update. In a chunk that
starts with S0, abar_i is the product of alpha_1..alpha_i, and gamma_S[i, j] = alpha_{j+1} ... alpha_i beta_j (i >= j)
the weight that the write of token j has in the state after token i ("prev" is one row earlier: of abar a one first, of
gamma_S zeros):

    erase  = (P K^T) * gamma_S_prev                    strictly lower triangular
    attend = (Q K^T) * gamma_S
    (I + erase) R = V - diag(abar_prev) P S0
    O  = diag(abar) Q S0 + attend R
    S' = abar_C S0 + K^T diag(write_S) R               write_S: the last row of gamma_S

Decays between two tokens are exponentials of sums over segments of logarithms, so every exponent is <= 0 and ``-inf``
gives exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops import cpu
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.chunking import chunk_scan
from mdn.ops.cpu import KernelTensors
from mdn.ops.first_order.first_derivative import first_derivative_only
from mdn.ops.first_order.inputs import FirstOrderTensors, PreparedTensors, expand_heads
from mdn.ops.first_order.products import matmul, solve_unit_lower
from mdn.ops.first_order.state_scan import state_scan
from mdn.ops.momentum.chunk_math import segment_decay
from mdn.ops.momentum.interface import RuleOptions
from mdn.ops.shared_checks import without_autocast


def chunk_scalar_decay(
    x: PreparedTensors,
    initial_state: Tensor,
    boundaries: SequenceBoundaries | None,
    chunk_size: int,
    outputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, HV, V]`` (if needed) and final states ``[N, HV, K, V]``, in the dtype of the computation."""
    scan = chunk_scan(x.v, boundaries, chunk_size)
    S0 = scan.rank_states(initial_state)
    with without_autocast(x.v):
        q, k, v, log_alpha = (scan.split(y) for y in (x.q, x.k, x.v, x.log_alpha))
        gamma_S = segment_decay(log_alpha)[..., 1:, 1:]  # without the chunk's start, which abar has
        if x.beta is not None:
            gamma_S = gamma_S * scan.split(x.beta).unsqueeze(-2)
        abar = log_alpha.cumsum(-1).exp().unsqueeze(-1)  # [..., C, 1]
        writes = k * gamma_S[..., -1, :].unsqueeze(-1)
        whole = abar[..., -1:, :]
        if x.p is None:
            residual = v
            starts, _, final = state_scan(whole, S0, scan.rounds, added=matmul(writes.mT, v))
        else:
            p = scan.split(x.p)
            erase = matmul(p, k.mT) * one_row_down(gamma_S)
            values, probes = solve_unit_lower(erase, v, one_row_down(abar, first=1.0) * p)
            starts, residual, final = state_scan(whole, S0, scan.rounds, values, probes, writes)
        if not outputs:
            return v.new_empty(0), scan.unrank_states(final)
        attend = matmul(q, k.mT) * gamma_S
        o = matmul(abar * q, starts) + matmul(attend, residual)
    return scan.join(o), scan.unrank_states(final)


def one_row_down(x: Tensor, first: float = 0.0) -> Tensor:
    """``[..., C, D]``: row i becomes row i + 1, the last one is dropped."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=first)


# ----------------------------------------------------------------------------------------------- the native CPU kernel


def native_scalar_decay(
    tensors: FirstOrderTensors,
    initial_state: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
    erases: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states. The kernel normalises, scales and shares key heads by itself."""
    alike = _alike(tensors)
    log_alpha, beta = (None if gate is None else gate.float() for gate in (alike.log_alpha, alike.beta))
    given = KernelTensors(
        alike.q, alike.k, alike.v, alike.p, log_alpha=log_alpha, beta=beta, initial_state=initial_state
    )
    kernel: Any = _NativeScalarDecay.apply
    o, final = kernel(boundaries, options, erases, *given)
    return o, final


def native_step(
    tensors: FirstOrderTensors, state: Tensor, slots: Tensor | None, options: RuleOptions, erases: bool
) -> Callable[[FirstOrderTensors, Tensor, Tensor | None], Tensor]:
    """The kernel's step for tensors like these: without any conversion if they need none."""
    run = cpu.prepared_first_order_step(tensors, state, slots, options, erases) if _alike(tensors) is tensors else None
    if run is not None:
        return run

    def converting(tensors: FirstOrderTensors, state: Tensor, slots: Tensor | None) -> Tensor:
        return cpu.first_order_step_(_alike(tensors), state, slots, options, erases).to(tensors.v.dtype)

    return converting


def _alike(tensors: FirstOrderTensors) -> FirstOrderTensors:
    """q, k, v and p in one dtype, p with the heads of k, as the kernel takes them."""
    q, k, v, p = tensors.q, tensors.k, tensors.v, tensors.p
    if p is not None and p.shape[-2] != q.shape[-2]:
        q, k, p = (expand_heads(x, v.shape[-2]) for x in (q, k, p))
    if any(x is not None and x.dtype != q.dtype for x in (k, v, p)):
        q, k, v, p = q.float(), k.float(), v.float(), None if p is None else p.float()
    alike = tensors._replace(q=q, k=k, v=v, p=p)
    return tensors if all(x is y for x, y in zip(alike, tensors)) else alike


class _NativeScalarDecay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, boundaries: SequenceBoundaries | None, options: RuleOptions, erases: bool, *given: Tensor | None
    ) -> Any:
        tensors, save = KernelTensors(*given), any(ctx.needs_input_grad)  # type: ignore[arg-type]
        o, final, residual = cpu.kernel_forward(tensors, boundaries, options, save, erases)
        if save:
            ctx.save_for_backward(*tensors, residual)
            ctx.boundaries, ctx.options, ctx.erases = boundaries, options, erases
        return o, final

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], grad_o: Tensor, grad_final: Tensor) -> Any:
        *given, residual = saved
        tensors = KernelTensors(*given)
        gradients = cpu.kernel_backward(grad_o, grad_final, tensors, residual, ctx.boundaries, ctx.options, ctx.erases)
        return None, None, None, *gradients

"""The native CPU backend of the momentum delta rule, and of the first-order rules that are special cases of it.

``forward``, ``backward`` and ``step_`` are those of a backend (``mdn.ops.momentum.interface``): float32 or bfloat16 in
and out, float32 arithmetic. Importing this loads nothing; ``why_unavailable()`` says whether the kernel can be used.

The first-order rules have no momentum: ``S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T``. They have one
state, ``[N, HV, K, V]``, and cost half as much:

    first_order_forward(q, k, v, p, log_alpha, beta, initial_state, boundaries, options, save_residual, erase=True)
        -> ForwardResult(o, final_state, residual)
    first_order_backward(grad_o, grad_final_state, q, k, v, p, log_alpha, beta, initial_state, residual, boundaries,
                         options, erase=True)
        -> gradients of q, k, v, p, log_alpha, beta, initial_state (None where the input is None)
    first_order_step_(q, k, v, p, log_alpha, beta, S, state_indices, options, erase=True) -> o

There ``log_alpha=None`` means alpha = 1, ``beta=None`` means beta = 1, and ``erase=False`` means p = 0 (nothing is
subtracted from v: linear attention, scalar decay). Everything else (``p=None`` is k, ``options.l2norm``,
``options.p_times_alpha``, value heads that share a key head, packs) is as in the momentum rule.
"""

from __future__ import annotations

from mdn.ops.cpu.bindings import instruction_set, why_unavailable
from mdn.ops.cpu.chunked import backward, first_order_backward, first_order_forward, forward
from mdn.ops.cpu.decode import first_order_step_, prepared_first_order_step, prepared_step, step_

__all__ = [
    "backward",
    "first_order_backward",
    "first_order_forward",
    "first_order_step_",
    "forward",
    "instruction_set",
    "prepared_first_order_step",
    "prepared_step",
    "step_",
    "why_unavailable",
]

"""The native CPU backend of the momentum delta rule, and of the first-order rules that are special cases of it.

``forward``, ``backward`` and ``step_`` are those of a backend (``mdn.ops.momentum.interface``): float32 or bfloat16 in
and out, float32 arithmetic. Importing this loads nothing; ``why_unavailable()`` says whether the kernel can be used.

The first-order rules have no momentum: ``S_t = alpha_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T``. They have one
state, ``[N, HV, K, V]``, cost half as much, and have functions of their own: ``kernel_forward`` and ``kernel_backward``
take ``KernelTensors`` without log_mu, ``first_order_step_`` takes the tensors of one token. There ``log_alpha=None``
means alpha = 1, ``beta=None`` means beta = 1, and ``erase=False`` means p = 0 (nothing is subtracted from v: linear
attention, scalar decay). Everything else (``p=None`` is k, ``options.l2norm``, ``options.p_times_alpha``, value heads
that share a key head, packs) is as in the momentum rule.
"""

from __future__ import annotations

from mdn.ops.cpu.bindings import instruction_set, why_unavailable
from mdn.ops.cpu.chunked import KernelTensors, backward, forward, kernel_backward, kernel_forward
from mdn.ops.cpu.decode import first_order_step_, prepared_first_order_step, prepared_step, step_

__all__ = [
    "KernelTensors",
    "backward",
    "first_order_step_",
    "forward",
    "instruction_set",
    "kernel_backward",
    "kernel_forward",
    "prepared_first_order_step",
    "prepared_step",
    "step_",
    "why_unavailable",
]

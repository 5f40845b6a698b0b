"""Train an MDN model with the paper's log-domain coefficients, to tell failures of arithmetic from those of dynamics.

Inside the block, every MDN layer computes its rule with ``mdn.bench.paper_form`` (autograd through the paper's forward
formula: the authors' hand-written backward is not reproduced here). Training passes only: no state, no packs.

One kindness to it: entries above the diagonal, which the formula does not use, are masked before the exponential. If
masked after it, their overflow alone makes autograd's gradient NaN (0 times infinity), in most runs at the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn import ops
from mdn.bench import paper_form


def _paper_rule(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_mu: Tensor, **options: Any
) -> tuple[Tensor, None]:
    if options.get("initial_state") is not None or options.get("output_final_state"):
        raise ValueError("the paper's arithmetic is for training passes: it keeps no state")
    if options.get("cu_seqlens") is not None:
        raise ValueError("cu_seqlens is not supported with the paper's arithmetic; set data.reset_at_documents=false")
    return paper_form.paper_chunk_momentum_delta_rule(q, k, v, log_alpha, log_mu, options["beta"], options["eta"]), None


def masked_coefficients(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``log_domain_coefficients`` with the same values, but a gradient that only the used entries can spoil."""
    log_abar, log_mbar = log_alpha.cumsum(-1), log_mu.cumsum(-1)
    log_c = torch.logcumsumexp((beta + 1e-6).log() + log_mbar - log_abar, dim=-1)
    log_c_before = F.pad(log_c[..., :-1], (1, 0), value=-math.inf)
    above = torch.ones(log_c.shape[-1], log_c.shape[-1], dtype=torch.bool, device=log_c.device).triu(1)
    share = 1 - (log_c_before.unsqueeze(-2) - log_c.unsqueeze(-1)).masked_fill(above, 0.0).exp()
    exponent = (log_abar + log_c).unsqueeze(-1) - log_mbar.unsqueeze(-2)
    return log_abar, log_mbar, (log_abar + log_c).exp(), exponent.masked_fill(above, -math.inf).exp() * share


@contextmanager
def paper_arithmetic() -> Iterator[None]:
    exact, coefficients = ops.chunk_momentum_delta_rule, paper_form.log_domain_coefficients
    ops.chunk_momentum_delta_rule = _paper_rule  # type: ignore[assignment]
    paper_form.log_domain_coefficients = masked_coefficients
    try:
        yield
    finally:
        ops.chunk_momentum_delta_rule = exact
        paper_form.log_domain_coefficients = coefficients

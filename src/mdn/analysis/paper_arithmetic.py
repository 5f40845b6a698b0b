"""Train an MDN model with the paper's log-domain coefficients, to tell failures of arithmetic from those of dynamics.

Inside the block, every MDN layer computes its rule with ``mdn.bench.paper_form`` (autograd through the paper's forward
formula: the authors' hand-written backward is not reproduced here). Training passes only: no state, no packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mdn import ops
from mdn.bench.paper_form import paper_chunk_momentum_delta_rule


def _paper_rule(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_mu: Tensor, **options: Any
) -> tuple[Tensor, None]:
    if options.get("initial_state") is not None or options.get("output_final_state"):
        raise ValueError("the paper's arithmetic is for training passes: it keeps no state")
    if options.get("cu_seqlens") is not None:
        raise ValueError("cu_seqlens is not supported with the paper's arithmetic; set data.reset_at_documents=false")
    return paper_chunk_momentum_delta_rule(q, k, v, log_alpha, log_mu, options["beta"], options["eta"]), None


@contextmanager
def paper_arithmetic() -> Iterator[None]:
    exact = ops.chunk_momentum_delta_rule
    ops.chunk_momentum_delta_rule = _paper_rule  # type: ignore[assignment]
    try:
        yield
    finally:
        ops.chunk_momentum_delta_rule = exact

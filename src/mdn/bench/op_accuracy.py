"""How many digits the forms of the rule keep in float32 as the momentum gate falls, against a float64 recurrence.

Setting: T = 256, chunks of 64, K = V = 64, unit keys, random alpha and beta inside the layer's bounds, constant log_mu.
What breaks the paper's form is log_mu far below log_alpha, so where it breaks depends on alpha as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mdn.bench.op_peers import NATIVE, OURS, PAPER_SOLVE, PeerInputs, RuleShape, make_inputs, relative_error
from mdn.bench.paper_form import paper_chunk_momentum_delta_rule
from mdn.ops import chunk_momentum_delta_rule, recurrent_momentum_delta_rule
from mdn.ops.backends import why_not

LOG_MU = (-0.1, -0.5, -1.0, -2.0, -3.0, -20.0, -math.inf)
RECURRENCE = "recurrence, float32"
TRITON_FLOAT32 = "mdn triton"


def accuracy_table(values: tuple[float, ...] = LOG_MU, device: str = "cpu") -> list[dict[str, float]]:
    """One row per log_mu: the output's largest error over its largest value, NaN where a form breaks."""
    rows = []
    for log_mu in values:
        inputs = {
            name: x.detach()
            for name, x in make_inputs(RuleShape(1, 256, 4, 64, 64), 11, largest_factor=4.0, device=device).items()
        }
        inputs["log_mu"] = torch.full_like(inputs["log_mu"], log_mu)
        exact: PeerInputs = {name: x.double() for name, x in inputs.items()}
        expected, _ = recurrent_momentum_delta_rule(**exact)
        errors = {name: _error(o, expected) for name, o in _outputs(inputs).items()}
        rows.append({"log_mu": log_mu, **errors})
    return rows


def _outputs(inputs: PeerInputs) -> dict[str, Tensor]:
    outputs = {
        RECURRENCE: recurrent_momentum_delta_rule(**inputs)[0],
        PAPER_SOLVE: paper_chunk_momentum_delta_rule(**inputs, library_solve=True).o,
        OURS: chunk_momentum_delta_rule(**inputs, backend="torch")[0],
    }
    for name, backend in ((NATIVE, "cpu"), (TRITON_FLOAT32, "triton")):
        if why_not(backend, inputs["q"]) is None:
            outputs[name] = chunk_momentum_delta_rule(**inputs, backend=backend)[0]
    return outputs


def _error(actual: Tensor, expected: Tensor) -> float:
    error = relative_error(actual, expected)
    return error if math.isfinite(error) else math.nan

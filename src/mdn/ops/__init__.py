"""The rules as functions on tensors ``[B, T, H, D]``. Light to import: torch only."""

from mdn.ops import first_order
from mdn.ops.backends import explain_backend
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order import *  # noqa: F403
from mdn.ops.momentum import (
    MomentumOutput,
    blockwise_momentum_delta_rule,
    chunk_momentum_delta_rule,
    chunk_vector_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
    recurrent_vector_momentum_delta_rule,
    vector_momentum_delta_step,
)

__all__ = [
    "MomentumOutput",
    "SequenceBoundaries",
    "blockwise_momentum_delta_rule",
    "chunk_momentum_delta_rule",
    "chunk_vector_momentum_delta_rule",
    "explain_backend",
    "fused_recurrent_momentum_delta_rule",
    "momentum_delta_step",
    "recurrent_momentum_delta_rule",
    "recurrent_vector_momentum_delta_rule",
    "vector_momentum_delta_step",
    *first_order.__all__,
]

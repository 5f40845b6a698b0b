from mdn.ops.momentum.api import (
    blockwise_momentum_delta_rule,
    chunk_momentum_delta_rule,
    chunk_vector_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    recurrent_momentum_delta_rule,
    recurrent_vector_momentum_delta_rule,
)
from mdn.ops.momentum.interface import MomentumOutput
from mdn.ops.momentum.step import momentum_delta_step, vector_momentum_delta_step

__all__ = [
    "MomentumOutput",
    "blockwise_momentum_delta_rule",
    "chunk_momentum_delta_rule",
    "chunk_vector_momentum_delta_rule",
    "fused_recurrent_momentum_delta_rule",
    "momentum_delta_step",
    "recurrent_momentum_delta_rule",
    "recurrent_vector_momentum_delta_rule",
    "vector_momentum_delta_step",
]

from mdn.ops.momentum_delta_rule.api import (
    blockwise_momentum_delta_rule,
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
)

__all__ = [
    "blockwise_momentum_delta_rule",
    "chunk_momentum_delta_rule",
    "fused_recurrent_momentum_delta_rule",
    "momentum_delta_step",
    "recurrent_momentum_delta_rule",
]

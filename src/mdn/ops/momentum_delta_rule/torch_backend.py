"""The ``torch`` backend: the three functions that docs/architecture.md asks of a backend."""

from mdn.ops.momentum_delta_rule.step import step_
from mdn.ops.momentum_delta_rule.torch_chunk import backward, forward

__all__ = ["backward", "forward", "step_"]

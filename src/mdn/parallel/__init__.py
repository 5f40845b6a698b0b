"""Long sequences over several processes: which tokens a process holds, and what the processes exchange.

plan = ContextParallelPlan.from_cu_seqlens(cu_seqlens, group)
local = plan.scatter(input_ids)                        [1, total] -> [1, this rank's tokens]
loss = model(local, shift_labels=plan.scatter(targets), context_parallel=plan).loss
loss.backward(); plan.sum_gradients(model)

docs/distributed.md has the algebra.
"""

from mdn.parallel.plan import ContextParallelPlan, Piece, context_parallel

__all__ = ["ContextParallelPlan", "Piece", "context_parallel"]

"""What context parallelism costs, measured on this machine.

Work: the rules and one layer as the middle rank of three sees them, whose tokens all belong to one document, in one
process that leaves out the communication. The time above that of an ordinary forward pass is that of the summary.

Exchange: forward and backward of one layer on several processes (gloo), against the same layer on as many tokens
without parallelism, and the bytes that its last rank receives beside those of the formula (mdn.parallel.volume).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from mdn import ops
from mdn.bench.timing import interleaved
from mdn.common.spawning import told_of_missing_guards
from mdn.layers import MIXERS, Mixer
from mdn.ops.boundaries import SequenceBoundaries
from mdn.parallel import ContextParallelPlan
from mdn.parallel.collectives import Traffic
from mdn.parallel.volume import layer_volume

MATRICES = {"momentum": 2, "gated_delta": 1}
"""in the state of a head, of the rules that are measured"""
HEAD_DIMS = ((64, 64), (128, 128), (128, 256))
"""their K and V"""
Seconds = dict[str, float]


@dataclass(frozen=True)
class BenchSize:
    """The layers that are measured, and the tokens on each rank."""

    mixers: tuple[str, ...]
    hidden_size: int
    num_heads: int
    head_dim: int
    tokens: int
    repeats: int

    def build(self, mixer: str) -> Mixer:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"num_heads": self.num_heads, "head_dim": self.head_dim}
        taken = MIXERS[mixer].argument_names()
        return MIXERS[mixer](self.hidden_size, **{name: x for name, x in sizes.items() if name in taken})

    def time(self, calls: dict[str, Callable[[], object]]) -> Seconds:
        return interleaved(calls, repeats=self.repeats, budget_seconds=float("inf"))


# ---------------------------------------------------------------------------------------------------------------- work


def measure_work(size: BenchSize) -> dict[str, Any]:
    """``rules`` and ``layers`` of the middle rank, from a process of its own with one thread."""
    return _spawn(_work, 1, size)


def _work(rank: int, ranks: int, store: str, size: BenchSize) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a group whose collectives do nothing

    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, 3 * size.tokens]))
    rules = [_rule(rule, *dims, plan, size) for rule in MATRICES for dims in HEAD_DIMS]
    return {"rules": rules, "layers": [_layer(mixer, plan, size) for mixer in size.mixers]}


def _rule(rule: str, key_dim: int, value_dim: int, plan: ContextParallelPlan, size: BenchSize) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (1, size.tokens, size.num_heads)
    q, k, v = torch.randn(*shape, key_dim), torch.randn(*shape, key_dim), torch.randn(*shape, value_dim)
    decay, mu = -torch.rand(2, *shape).square()
    beta = torch.rand(shape)

    def run(needs_gradient: bool, **where: Any) -> Callable[[], object]:
        def call() -> object:
            given = q, k, v.detach().requires_grad_(needs_gradient)
            if rule == "momentum":
                return ops.chunk_momentum_delta_rule(*given, decay, mu, beta=beta, **where)
            return ops.chunk_gated_delta_rule(*given, decay, beta, use_qk_l2norm_in_kernel=True, **where)

        return call

    seconds = size.time(
        {
            "alone": run(False),
            "shared": run(False, context_parallel=plan),
            "alone_training": run(True),
            "shared_training": run(True, context_parallel=plan),
        }
    )
    return {"rule": rule, "K": key_dim, "V": value_dim, **_shares(seconds)}


def _layer(mixer: str, plan: ContextParallelPlan, size: BenchSize) -> dict[str, Any]:
    layer, x = size.build(mixer), torch.randn(1, size.tokens, size.hidden_size)
    alone = SequenceBoundaries.from_lengths([size.tokens])

    def run(needs_gradient: bool, **where: Any) -> Callable[[], object]:
        def call() -> object:
            with torch.set_grad_enabled(needs_gradient):
                return layer(x, **where)

        return call

    seconds = size.time(
        {
            "alone": run(False, cu_seqlens=alone),
            "shared": run(False, context_parallel=plan),
            "alone_training": run(True, cu_seqlens=alone),
            "shared_training": run(True, context_parallel=plan),
        }
    )
    return {"mixer": mixer, **_shares(seconds)}


def _shares(seconds: Seconds) -> dict[str, float]:
    """The summary over an ordinary forward pass: without gradients, and where a backward pass follows."""
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "share": seconds["shared"] / seconds["alone"] - 1,
        "training_share": seconds["shared_training"] / seconds["alone_training"] - 1,
    }


# ------------------------------------------------------------------------------------------------------------ exchange


def measure_exchange(size: BenchSize, ranks: int) -> list[dict[str, Any]]:
    """A row per mixer, from the last of ``ranks`` processes that share one document."""
    rows: list[dict[str, Any]] = _spawn(_exchange, ranks, size)
    return rows


def _exchange(rank: int, ranks: int, store: str, size: BenchSize) -> list[dict[str, Any]]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = [_training_step(mixer, ranks, size) for mixer in size.mixers]
    dist.barrier()
    return rows


def _training_step(mixer: str, ranks: int, size: BenchSize) -> dict[str, Any]:
    layer, x = size.build(mixer), torch.randn(1, size.tokens, size.hidden_size, requires_grad=True)
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, size.tokens * ranks]))

    def run(**where: Any) -> Callable[[], object]:
        return lambda: layer(x, **where).sum().backward()

    shared = run(context_parallel=plan)
    seconds = size.time({"alone": run(cu_seqlens=SequenceBoundaries.from_lengths([size.tokens])), "shared": shared})
    Traffic.received = 0
    shared()
    return {
        "mixer": mixer,
        "ranks": ranks,
        "alone_seconds": seconds["alone"],
        "shared_seconds": seconds["shared"],
        "received_bytes": Traffic.received,
        "bytes_by_formula": layer_volume(layer, size.tokens, ranks).total,
    }


# ----------------------------------------------------------------------------------------------------------- processes


def _spawn(function: Callable[[int, int, str, BenchSize], Any], ranks: int, size: BenchSize) -> Any:
    """What ``function`` returns on the last of ``ranks`` processes of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = function, ranks, folder, asdict(size)
        with told_of_missing_guards():
            processes.start_processes(_on_rank, arguments, nprocs=ranks, start_method="spawn")
        return json.loads((Path(folder) / "result.json").read_text())


def _on_rank(
    rank: int,
    function: Callable[[int, int, str, BenchSize], Any],
    ranks: int,
    folder: str,
    size: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    result = function(rank, ranks, f"{folder}/store", BenchSize(**size))
    if rank == ranks - 1:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()

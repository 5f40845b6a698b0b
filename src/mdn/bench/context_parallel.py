"""What context parallelism costs: measured on a few processes of this machine, and by formula for large ones.

Measured, in one layer (mixer) of the middle rank: the passes that summarise a range, as a share of the ordinary forward
pass of the rule and of the layer; the time of forward and backward against the same layer on the same number of tokens
without parallelism; and the bytes received, which must be those of the formula (mdn.parallel.volume).
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

from mdn.bench.timing import interleaved
from mdn.common.results import markdown_table
from mdn.layers import MIXERS, Mixer
from mdn.models.info import load_config
from mdn.ops.boundaries import SequenceBoundaries
from mdn.parallel import ContextParallelPlan
from mdn.parallel.collectives import Traffic
from mdn.parallel.volume import Volume, layer_volume
from mdn.training.build import meta_model

LINK = 50e9
"""bytes per second of one 400 Gb/s link, for the times by formula"""
CONFIGS = ("mdn_400M", "mdn_1.3B")
TOKENS = (2**17, 2**20)
RANKS = (8, 16, 64)


@dataclass(frozen=True)
class LayerSize:
    """One layer and the tokens on each rank."""

    mixer: str
    hidden_size: int
    num_heads: int
    head_dim: int
    tokens: int
    repeats: int

    def build(self) -> Mixer:
        torch.manual_seed(0)
        sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim}
        taken = MIXERS[self.mixer].argument_names()
        return MIXERS[self.mixer](self.hidden_size, **{name: x for name, x in sizes.items() if name in taken})


# ------------------------------------------------------------------------------------------------------------ measured


def measure(size: LayerSize, ranks: int) -> dict[str, Any]:
    """Figures of the middle rank of ``ranks`` processes that share one document."""
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_on_rank, (ranks, folder, asdict(size)), nprocs=ranks, start_method="spawn")
        figures: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return {**asdict(size), "ranks": ranks, **figures}


def _on_rank(rank: int, ranks: int, folder: str, size: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    figures = _figures(LayerSize(**size), ranks)
    if rank == ranks // 2:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _figures(size: LayerSize, ranks: int) -> dict[str, Any]:
    layer = size.build()
    x = torch.randn(1, size.tokens, size.hidden_size, requires_grad=True)
    alone = SequenceBoundaries.from_lengths([size.tokens])
    plan = ContextParallelPlan.from_cu_seqlens(torch.tensor([0, size.tokens * ranks]))

    def forward(**where: Any) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return layer(x, **where)

        return call

    def both(**where: Any) -> Callable[[], object]:
        return lambda: layer(x, **where).sum().backward()

    calls = {
        "forward_alone": forward(cu_seqlens=alone),
        "forward_shared": forward(context_parallel=plan),
        "training_alone": both(cu_seqlens=alone),
        "training_shared": both(context_parallel=plan),
    }
    seconds = interleaved(calls, repeats=size.repeats, budget_seconds=float("inf"))
    Traffic.received = 0
    both(context_parallel=plan)()
    volume = layer_volume(layer, size.tokens, ranks)
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "summary_share_of_layer": seconds["forward_shared"] / seconds["forward_alone"] - 1,
        "training_ratio": seconds["training_shared"] / seconds["training_alone"],
        "received_bytes": Traffic.received,
        "bytes_by_formula": volume.total,
    }


def measured_table(rows: list[dict[str, Any]]) -> str:
    head = ("mixer", "ranks", "tokens per rank", "forward, more", "training, ratio", "received", "by formula")
    return markdown_table(
        head,
        [
            (
                row["mixer"],
                str(row["ranks"]),
                f"{row['tokens']:,}",
                f"{row['summary_share_of_layer']:+.0%}",
                f"{row['training_ratio']:.2f}",
                _mebibytes(row["received_bytes"]),
                _mebibytes(row["bytes_by_formula"]),
            )
            for row in rows
        ],
    )


# ---------------------------------------------------------------------------------------------------------- by formula


def by_formula() -> list[dict[str, Any]]:
    """Bytes that a rank receives in one layer's forward pass: ours, and those of two other ways, at bfloat16."""
    rows = []
    for name in CONFIGS:
        mixer: Any = meta_model(load_config(name)).model.layers[0].attn
        for tokens in TOKENS:
            for ranks in RANKS:
                share = tokens // ranks
                ours = layer_volume(mixer, share, ranks, activation_bytes=2)
                rows.append(
                    {
                        "config": name,
                        "tokens": tokens,
                        "ranks": ranks,
                        "summaries": ours.forward,
                        "summaries_backward": ours.backward,
                        "ring": _ring(mixer).forward,
                        "ulysses": _ulysses(mixer, share, ranks).forward,
                        "ulysses_possible": mixer.num_heads % ranks == 0,
                    }
                )
    return rows


def _ring(mixer: Any) -> Volume:
    """State passing: every rank waits for its left neighbour's states."""
    heads, key_dim, value_dim = mixer.state_shapes()["S"].shape
    matrices = sum(len(state.shape) == 3 for state in mixer.state_shapes().values())
    once = 4 * matrices * heads * key_dim * value_dim
    return Volume(once, once)


def _ulysses(mixer: Any, tokens: int, ranks: int) -> Volume:
    """All-to-all from tokens to heads and back: q, k, v and o in bfloat16, four gates in float32."""
    per_token = 2 * (2 * mixer.key_dim + 2 * mixer.value_dim) + 4 * 4 * mixer.num_v_heads
    once = tokens * per_token * (ranks - 1) // ranks
    return Volume(once, once)


def formula_table(rows: list[dict[str, Any]]) -> str:
    head = ("config", "tokens", "ranks", "tokens per rank", "summaries", "ring of states", "Ulysses")
    return markdown_table(
        head,
        [
            (
                row["config"],
                f"{row['tokens'] // 1024}k",
                str(row["ranks"]),
                f"{row['tokens'] // row['ranks']:,}",
                f"{_mebibytes(row['summaries'])}, {_milliseconds(row['summaries'])}",
                f"{_mebibytes(row['ring'])} x {row['ranks'] - 1} hops, "
                f"{_milliseconds(row['ring'] * (row['ranks'] - 1))}",
                f"{_mebibytes(row['ulysses'])}, {_milliseconds(row['ulysses'])}"
                + ("" if row["ulysses_possible"] else " (not possible: 6 heads)"),
            )
            for row in rows
        ],
    )


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _milliseconds(size: float) -> str:
    return f"{size / LINK * 1e3:,.2f} ms"

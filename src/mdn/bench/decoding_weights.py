"""Decoding with packed weights: milliseconds per step of one model in every format, in one run, as ratios.

``IN_TORCH`` is the float32 model without native layers and replayed steps: every layer in torch, the rule native.
Where llama.cpp is installed (``pip install xllamacpp gguf``) a model that reads as many random weights per token is
decoded by it too.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mdn.bench.decoding import decoder, filled_cache
from mdn.bench.llama_peer import LlamaPeer
from mdn.bench.timing import interleaved, machine
from mdn.common.results import Table
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops.fused import definitions_only

IN_TORCH = "float32, layers in torch"
PROMPT = 64
PEERS = {"float32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""our formats and llama.cpp's of the same size"""


def weights_per_token(model: MomentumDeltaNetForCausalLM) -> int:
    """Weights that a step reads: all matrices but the embedding."""
    matrices = (p for name, p in model.named_parameters() if p.dim() == 2 and "embeddings" not in name)
    return sum(p.numel() for p in matrices)


def bench(
    config: MomentumDeltaNetConfig,
    formats: list[str],
    batches: list[int],
    repeats: int,
    seconds: float,
    llama: bool,
) -> dict[str, Any]:
    """Rows of (format, batch): seconds per decode step, and how many times faster than float32 at the same batch."""
    facts = machine()
    torch.manual_seed(0)
    original = MomentumDeltaNetForCausalLM(config).eval()
    weights = weights_per_token(original)
    models = {"float32": original}
    for name in formats:
        models[name] = copy.deepcopy(original).quantize(name)
    rows = []
    with contextlib.ExitStack() as stack:
        peers = _peers(stack, weights, formats) if llama else {}
        for batch in batches:
            calls = {name: decoder(model, filled_cache(model, batch, PROMPT), batch) for name, model in models.items()}
            calls[IN_TORCH] = _in_torch(decoder(original, filled_cache(original, batch, PROMPT), batch))
            for call in calls.values():  # the second step is recorded, the third replayed
                call()
                call()
            least = interleaved(calls, repeats, seconds, label=f"batch {batch}")
            if batch == 1:
                least |= {f"llama.cpp {PEERS[name]}": peer.seconds_per_token() for name, peer in peers.items()}
            rows += [
                {"format": name, "batch": batch, "seconds": time, "ratio": least["float32"] / time}
                for name, time in least.items()
            ]
    return {"machine": facts, "weights_per_token": weights, "rows": rows}


def _in_torch(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with definitions_only():
            return call()

    return run


def _peers(stack: contextlib.ExitStack, weights: int, formats: list[str]) -> dict[str, LlamaPeer]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return {name: LlamaPeer(folder, PEERS[name], weights) for name in ("float32", *formats)}


def tables(content: dict[str, Any]) -> list[Table]:
    """Milliseconds per step, the ratio to float32, to llama.cpp, and tokens per second against batch 1."""
    rows = content["rows"]
    batches = sorted({row["batch"] for row in rows})
    found = {(row["format"], row["batch"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = []
        for batch in batches:
            row = found.get((name, batch))
            cells.append("" if row is None else f"{1e3 * row['seconds']:.1f} ({row['ratio']:.2f})")
        lines.append([name, *cells, _against_llama(found, name), _against_one(found, name, batches)])
    header = ["weights", *(f"batch {batch}" for batch in batches), "llama.cpp / ours", "tokens/s, largest over 1"]
    title = "milliseconds per decode step (times faster than float32)"
    return [Table(f"{title}, {content['weights_per_token'] / 1e6:.0f} M weights read per token", header, lines)]


def _against_llama(found: dict[Any, Any], name: str) -> str:
    peer, mine = found.get((f"llama.cpp {PEERS.get(name)}", 1)), found.get((name, 1))
    return "" if peer is None or mine is None else f"{peer['seconds'] / mine['seconds']:.2f}"


def _against_one(found: dict[Any, Any], name: str, batches: list[int]) -> str:
    one, many = found.get((name, 1)), found.get((name, batches[-1]))
    if one is None or many is None or batches[-1] == 1:
        return ""
    return f"{batches[-1] * one['seconds'] / many['seconds']:.1f}"

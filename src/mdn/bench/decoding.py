"""Decoding: seconds per token and bytes of cache per sequence against the context length, all mixers in one run.

Models have the same hidden size, depth and heads, and the MLP is made wider or narrower until the parameters are equal.
A cache of a given context is made, not decoded: recurrent layers read a short prompt and are given the length (the cost
cannot depend on it), attention layers get random keys and values of that length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from mdn.bench.equal_size import ModelSize
from mdn.bench.timing import interleaved, machine
from mdn.common.plots import MIXER_COLOURS, doubling_axis, figure, legend_outside, plain_log_axis
from mdn.common.results import Table
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM

PROMPT = 64
REFERENCE = "momentum_deltanet"


class DecodingSize(ModelSize):
    def configs(self, mixers: list[str]) -> dict[str, MomentumDeltaNetConfig]:
        """One config per mixer, all with as many parameters as the reference's model."""
        return self.equal_configs({name: {"mixer": name} for name in mixers}, REFERENCE)


@torch.no_grad()
def filled_cache(model: MomentumDeltaNetForCausalLM, batch: int, context: int) -> DynamicCache:
    """A cache as after ``context`` tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, min(PROMPT, context)), generator=generator)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    rest = context - ids.shape[1]
    for layer in cache.layers:
        if hasattr(layer, "advance"):
            layer.advance(rest)
        elif rest:
            keys = torch.randn(*layer.keys.shape[:2], rest, layer.keys.shape[-1], generator=generator)
            layer.update(keys, keys.roll(1, dims=2))
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of every tensor the cache holds."""
    total = 0
    for layer in cache.layers:
        held: list[Any] = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in ("conv_states", "recurrent_states"):
            held += list(getattr(layer, states, {}).values())
        total += sum(x.numel() * x.element_size() for x in held if isinstance(x, torch.Tensor))
    return total


def decoder(model: nn.Module, cache: DynamicCache, batch: int) -> Callable[[], object]:
    token = torch.zeros(batch, 1, dtype=torch.long)

    @torch.no_grad()
    def call() -> object:
        return model(input_ids=token, past_key_values=cache, use_cache=True, all_tokens_valid=True)

    return call


def bench(
    mixers: list[str], contexts: list[int], batches: list[int], size: DecodingSize, repeats: int, seconds: float
) -> dict[str, Any]:
    """Rows of (mixer, batch, context): seconds per decoding step, ratio to the reference, bytes per sequence."""
    torch.manual_seed(0)
    models = {name: MomentumDeltaNetForCausalLM(config).eval() for name, config in size.configs(mixers).items()}
    rows = []
    for batch in batches:
        for context in contexts:
            caches = {mixer: filled_cache(model, batch, context) for mixer, model in models.items()}
            memory = {mixer: cache_bytes(cache) // batch for mixer, cache in caches.items()}
            calls = {mixer: decoder(models[mixer], cache, batch) for mixer, cache in caches.items()}
            # A model decodes many steps in a row, so its weights and states are in the caches where they fit.
            least = interleaved(calls, repeats, seconds, label=f"batch {batch}, context {context}", untimed=2)
            for mixer, time in least.items():
                ratio = time / least[REFERENCE] if REFERENCE in least else float("nan")
                facts = {"mixer": mixer, "batch": batch, "context": context, "seconds": time}
                rows.append({**facts, "ratio to MDN": ratio, "bytes per sequence": memory[mixer]})
    parameters = {mixer: model.num_parameters() for mixer, model in models.items()}
    return {"size": dataclasses.asdict(size), "machine": machine(), "parameters": parameters, "rows": rows}


def growth(rows: list[dict[str, Any]], mixer: str, batch: int) -> float:
    """Time per token at the longest context over that at the shortest."""
    mine = sorted((r["context"], r["seconds"]) for r in rows if r["mixer"] == mixer and r["batch"] == batch)
    return mine[-1][1] / mine[0][1]


def tables(content: dict[str, Any]) -> list[Table]:
    """Per batch size, milliseconds per decoding step by context."""
    found = []
    rows = content["rows"]
    contexts = sorted({row["context"] for row in rows})
    for batch in sorted({row["batch"] for row in rows}):
        lines = []
        for mixer in content["parameters"]:
            mine = {row["context"]: row for row in rows if row["mixer"] == mixer and row["batch"] == batch}
            cells = [f"{1e3 * mine[c]['seconds']:.2f} ({mine[c]['ratio to MDN']:.2f})" for c in contexts]
            memory = f"{mine[contexts[-1]]['bytes per sequence'] / 2**20:.2f}"
            lines.append([mixer, *cells, f"{growth(rows, mixer, batch):.2f}", memory])
        header = ["mixer", *(f"{c:,}" for c in contexts), "longest / shortest", f"MiB per sequence at {contexts[-1]:,}"]
        found.append(Table(f"batch {batch}: milliseconds per decoding step (ratio to MDN) by context", header, lines))
    return found


def draw(content: dict[str, Any]) -> Any:
    """Per batch size the latency against context; last, the memory per sequence."""
    rows = content["rows"]
    batches = sorted({row["batch"] for row in rows})
    fig, axes = figure(
        "Decoding at equal size",
        "context (tokens)",
        columns=len(batches) + 1,
        size=(3.6 * (len(batches) + 1) + 1.6, 3.8),
    )
    for axis, batch in zip(axes, [*batches, None]):
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            shown = [r for r in rows if r["mixer"] == mixer and r["batch"] == (batches[0] if batch is None else batch)]
            values = [r["bytes per sequence"] / 2**20 if batch is None else 1e3 * r["seconds"] for r in shown]
            wide = 2.4 if mixer == REFERENCE else 1.2
            axis.plot([r["context"] for r in shown], values, "o-", color=MIXER_COLOURS[mixer], lw=wide, label=mixer)
        doubling_axis(axis, (row["context"] for row in rows))
        plain_log_axis(axis)
        title = "memory per sequence" if batch is None else f"latency, batch {batch}"
        axis.set(title=title, ylabel="MiB" if batch is None else "ms per decoding step")
        axis.tick_params(axis="x", labelsize=8)
    legend_outside(fig, axes[0])
    return fig

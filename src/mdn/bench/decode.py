"""Decoding: seconds per token and bytes of cache per sequence against the context length, all mixers in one run.

Models have the same hidden size, depth and heads, and the MLP is made wider or narrower until the parameters are equal.
A cache of a given context is made, not decoded: recurrent layers read a short prompt and are told the length (the cost
cannot depend on it), attention layers get random keys and values of that length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from mdn.bench.timing import interleaved, machine
from mdn.common.plots import MIXER_COLOURS, figure
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.build import count_parameters

PROMPT = 64
REFERENCE = "momentum_deltanet"


@dataclasses.dataclass(frozen=True)
class Size:
    hidden_size: int = 256
    layers: int = 2
    heads: int = 4
    vocab_size: int = 1024


def equal_configs(mixers: list[str], size: Size) -> dict[str, MomentumDeltaNetConfig]:
    """One config per mixer; MLP widths are chosen so that all have as many parameters as the reference's model."""
    width = 3 * size.hidden_size
    aim = count_parameters(_config(REFERENCE, size, width))
    configs = {}
    for mixer in mixers:
        per_unit = 3 * size.hidden_size * size.layers
        excess = count_parameters(_config(mixer, size, width)) - aim
        configs[mixer] = _config(mixer, size, max(width - round(excess / per_unit), 1))
    return configs


def _config(mixer: str, size: Size, width: int) -> MomentumDeltaNetConfig:
    return MomentumDeltaNetConfig(
        mixer=mixer,
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.layers,
        num_heads=size.heads,
        head_dim=size.hidden_size // size.heads,
        expand_v=1,
        intermediate_size=width,
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.no_grad()
def filled_cache(model: MomentumDeltaNetForCausalLM, batch: int, context: int, seed: int = 0) -> DynamicCache:
    """A cache as after ``context`` tokens."""
    generator = torch.Generator().manual_seed(seed)
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


def _decoder(model: nn.Module, cache: DynamicCache, batch: int) -> Callable[[], object]:
    token = torch.zeros(batch, 1, dtype=torch.long)

    @torch.no_grad()
    def call() -> object:
        return model(input_ids=token, past_key_values=cache, use_cache=True, all_tokens_valid=True)

    return call


def bench(
    mixers: list[str], contexts: list[int], batches: list[int], size: Size, repeats: int, seconds: float
) -> dict[str, Any]:
    """Rows of (mixer, batch, context): seconds per decoding step, ratio to the reference, bytes per sequence."""
    configs = equal_configs(mixers, size)
    torch.manual_seed(0)
    models = {mixer: MomentumDeltaNetForCausalLM(config).eval() for mixer, config in configs.items()}
    rows = []
    for batch in batches:
        for context in contexts:
            caches = {mixer: filled_cache(model, batch, context) for mixer, model in models.items()}
            memory = {mixer: cache_bytes(cache) // batch for mixer, cache in caches.items()}
            calls = {mixer: _decoder(models[mixer], cache, batch) for mixer, cache in caches.items()}
            least = interleaved(calls, repeats, seconds, label=f"batch {batch}, context {context}")
            for mixer, time in least.items():
                ratio = time / least[REFERENCE] if REFERENCE in least else float("nan")
                facts = {"mixer": mixer, "batch": batch, "context": context, "seconds": time}
                rows.append({**facts, "ratio to MDN": ratio, "bytes per sequence": memory[mixer]})
    parameters = {mixer: count_parameters(config) for mixer, config in configs.items()}
    return {"size": dataclasses.asdict(size), "machine": machine(), "parameters": parameters, "rows": rows}


def growth(rows: list[dict[str, Any]], mixer: str, batch: int) -> float:
    """Time per token at the longest context over that at the shortest."""
    mine = sorted((r["context"], r["seconds"]) for r in rows if r["mixer"] == mixer and r["batch"] == batch)
    return mine[-1][1] / mine[0][1]


def draw(results: dict[str, Any]) -> Any:
    """Per batch size the latency against context; last, the memory per sequence."""
    rows = results["rows"]
    batches = sorted({row["batch"] for row in rows})
    fig, axes = figure(
        "Decoding at equal size", "context (tokens)", columns=len(batches) + 1, size=(3.6 * (len(batches) + 1), 3.8)
    )
    for axis, batch in zip(axes, [*batches, None]):
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            shown = [r for r in rows if r["mixer"] == mixer and r["batch"] == (batches[0] if batch is None else batch)]
            values = [r["bytes per sequence"] / 2**20 if batch is None else 1e3 * r["seconds"] for r in shown]
            wide = 2.4 if mixer == REFERENCE else 1.2
            axis.plot([r["context"] for r in shown], values, "o-", color=MIXER_COLOURS[mixer], lw=wide, label=mixer)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        title = "memory per sequence" if batch is None else f"latency, batch {batch}"
        axis.set(title=title, ylabel="MiB" if batch is None else "ms per decoding step")
    axes[0].legend(fontsize=6)
    return fig

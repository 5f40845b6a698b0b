"""Serving in vLLM: tokens per second and latencies against the batch size, and memory per sequence against its length.

Models have the same depth, hidden size and number of parameters. All engines live in this process and take turns, so
that a slow phase of the machine affects every model. A round sends a batch of prompts at once and steps the engine
until all are answered. Latencies are those of the engine, without HTTP.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from mdn.bench.equal_size import ModelSize
from mdn.bench.timing import machine
from mdn.common.plots import COLOURS, MIXER_COLOURS, doubling_axis, figure, legend_outside, plain_log_axis
from mdn.common.results import Table
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.build import count_parameters

REFERENCE = "momentum_deltanet"
HYBRID = "hybrid (3 momentum_deltanet, 1 attention)"
MODELS = (REFERENCE, "gated_deltanet", HYBRID, "attention")
PERCENTILES = (50, 95, 99)
PAGE_TOKENS = 32
"""tokens of keys and values per page, if a page need not be larger to hold a recurrent state"""


@dataclasses.dataclass(frozen=True)
class ServingSize(ModelSize):
    """Prompts and answers have so many tokens."""

    layers: int = 4
    prompt: int = 128
    answer: int = 64

    def configs(self, models: list[str]) -> dict[str, MomentumDeltaNetConfig]:
        attention_layers = {"layers": list(range(3, self.layers, 4)), "num_heads": self.heads}
        own = {name: {"attn": attention_layers} if name == HYBRID else {"mixer": name} for name in models}
        return self.equal_configs(own, REFERENCE)


@dataclasses.dataclass
class Timings:
    """Times of one model and batch size, over all rounds."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """per round"""
    first_token: list[float] = dataclasses.field(default_factory=list)
    """from the arrival of a request to its first token"""
    next_token: list[float] = dataclasses.field(default_factory=list)
    """from one token to the next"""


class BenchmarkedEngine:
    """A vLLM engine in this process with a model of random weights."""

    def __init__(self, config: MomentumDeltaNetConfig, longest: int, most_requests: int):
        from vllm import EngineArgs, LLMEngine

        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            MomentumDeltaNetForCausalLM(config).save_pretrained(folder)
            arguments = EngineArgs(
                model=folder,
                dtype="float32",
                skip_tokenizer_init=True,
                enforce_eager=True,
                enable_prefix_caching=False,
                max_model_len=longest,
                max_num_seqs=most_requests,
                block_size=PAGE_TOKENS,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
            self.engine = LLMEngine.from_engine_args(arguments)
        self.vocab_size, self.requests = config.vocab_size, 0
        self.random = torch.Generator().manual_seed(0)

    def add(self, prompt: int, answer: int) -> None:
        """A request of so many random tokens, for so many greedy ones."""
        from vllm import SamplingParams

        self.requests += 1
        ids = torch.randint(self.vocab_size, (prompt,), generator=self.random).tolist()
        settings = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.requests), {"prompt_token_ids": ids}, settings)

    def round(self, batch: int, size: ServingSize, timings: Timings) -> None:
        """A batch of requests from their arrival to the last token."""
        begin = time.perf_counter()
        last: dict[str, float] = {}
        for _ in range(batch):
            self.add(size.prompt, size.answer)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                kind = timings.next_token if output.request_id in last else timings.first_token
                kind.append(now - last.get(output.request_id, begin))
                last[output.request_id] = now
        timings.seconds.append(time.perf_counter() - begin)

    def bytes_per_sequence(self, context: int) -> int:
        """Pages that one request of this length holds, in bytes."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        pool, layout = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config
        # Layers of different kinds share one allocation, whose size every entry repeats.
        page = max(tensor.size for tensor in layout.kv_cache_tensors) // layout.num_blocks
        free, held = pool.get_num_free_blocks(), 0
        self.add(context - 1, 2)
        while self.engine.has_unfinished_requests():
            self.engine.step()
            held = max(held, free - pool.get_num_free_blocks())
        return held * page


def bench(models: list[str], batches: list[int], contexts: list[int], size: ServingSize, rounds: int) -> dict[str, Any]:
    """Rows of (model, batch) with tokens per second and latencies, and of (model, context) with bytes."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB for the pages of each engine
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    transformers.utils.logging.disable_progress_bar()
    facts = machine()
    configs = size.configs(models)
    longest = max([size.prompt + size.answer, *contexts]) + 1
    engines = {name: BenchmarkedEngine(config, longest, max(batches)) for name, config in configs.items()}
    rows = []
    for batch in batches:
        timings = {name: Timings() for name in models}
        for number in tqdm(range(rounds + 1), desc=f"batch {batch}", leave=False):
            turns = list(engines.items())[:: -1 if number % 2 else 1]  # none always follows the same one
            for name, engine in turns:
                engine.round(batch, size, timings[name] if number else Timings())  # the first one warms up
        rows += _rows(timings, batch, size)
    memory = [
        {"model": name, "context": context, "bytes per sequence": engine.bytes_per_sequence(context)}
        for name, engine in engines.items()
        for context in contexts
    ]
    import vllm

    return {
        "vllm": vllm.__version__,
        "size": dataclasses.asdict(size),
        "machine": facts,
        "rounds": rounds,
        "parameters": {name: count_parameters(config) for name, config in configs.items()},
        "rows": rows,
        "memory": memory,
    }


def _rows(timings: dict[str, Timings], batch: int, size: ServingSize) -> list[dict[str, Any]]:
    rates = {name: batch * size.answer / min(found.seconds) for name, found in timings.items()}
    rows = []
    for name, found in timings.items():
        row = {"model": name, "batch": batch, "tokens per second": rates[name]}
        row["ratio to MDN"] = rates[name] / rates[REFERENCE] if REFERENCE in rates else float("nan")
        for what, seconds in (("first token", found.first_token), ("next token", found.next_token)):
            for percent in PERCENTILES:
                row[f"{what} p{percent}"] = float(np.percentile(seconds, percent)) if seconds else float("nan")
        rows.append(row)
    return rows


# -------------------------------------------------------------------------------------------------- tables and figure


def tables(content: dict[str, Any]) -> list[Table]:
    rows, memory = content["rows"], content["memory"]
    batches = sorted({row["batch"] for row in rows})
    contexts = sorted({row["context"] for row in memory})
    speed, latency, held = [], [], []
    for name in content["parameters"]:
        mine = {row["batch"]: row for row in rows if row["model"] == name}
        speed.append([name, *(f"{mine[b]['tokens per second']:.0f} ({mine[b]['ratio to MDN']:.2f})" for b in batches)])
        for batch in batches:
            kinds = ([mine[batch][f"{what} token p{p}"] for p in PERCENTILES] for what in ("first", "next"))
            times = [" / ".join(f"{1e3 * seconds:.1f}" for seconds in kind) for kind in kinds]
            latency.append([name, str(batch), *times])
        sizes = {row["context"]: row["bytes per sequence"] for row in memory if row["model"] == name}
        held.append([name, *(f"{sizes[c] / 2**20:.2f}" for c in contexts)])
    return [
        Table("tokens per second (ratio to MDN) by batch size", ["model", *map(str, batches)], speed),
        Table("milliseconds, p50 / p95 / p99", ["model", "batch", "to the first token", "to the next"], latency),
        Table("MiB of pages per sequence by context", ["model", *(f"{c:,}" for c in contexts)], held),
    ]


def draw(content: dict[str, Any]) -> Any:
    """Throughput, latency and memory side by side."""
    fig, axes = figure("Serving in vLLM at equal size", columns=3, size=(13.0, 3.8))
    for name in content["parameters"]:
        rows = [row for row in content["rows"] if row["model"] == name]
        memory = [row for row in content["memory"] if row["model"] == name]
        look = {"color": MIXER_COLOURS.get(name, COLOURS[2]), "lw": 2.4 if name == REFERENCE else 1.2}
        batches = [row["batch"] for row in rows]
        axes[0].plot(batches, [row["tokens per second"] for row in rows], "o-", label=name, **look)
        axes[1].plot(batches, [1e3 * row["next token p50"] for row in rows], "o-", **look)
        axes[1].plot(batches, [1e3 * row["next token p99"] for row in rows], "o:", **look)
        axes[2].plot([m["context"] for m in memory], [m["bytes per sequence"] / 2**20 for m in memory], "o-", **look)
    axes[0].set(title="throughput", xlabel="batch", ylabel="tokens per second")
    axes[1].set(title="next token, p50 and p99 (dotted)", xlabel="batch", ylabel="ms")
    axes[2].set(title="memory per sequence", xlabel="context (tokens)", ylabel="MiB")
    for axis in axes[:2]:
        doubling_axis(axis, (row["batch"] for row in content["rows"]))
    doubling_axis(axes[2], (row["context"] for row in content["memory"]))
    for axis in axes:
        plain_log_axis(axis)
    legend_outside(fig, axes[0])
    return fig

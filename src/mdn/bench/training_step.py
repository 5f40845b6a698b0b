"""Tokens per second of a whole training step (forward, backward, clipping, AdamW) for every mixer, at equal size.

All mixers share one backbone; the width of the MLP is set so that the models have equally many parameters.
Every length has the same number of tokens per step. Times are compared within one process, in turn, as ratios to
attention.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdn.bench.equal_size import equal_size_configs
from mdn.bench.timing import interleaved
from mdn.common.heap import keep_freed_memory
from mdn.common.plots import MIXER_COLOURS, doubling_axis, figure, legend_outside
from mdn.common.results import Table
from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops.fused import definitions_only
from mdn.training.build import model_config
from mdn.training.recipe import load_recipe
from mdn.training.run_plan import vocabulary

BASELINE = "attention"
REFERENCE = "momentum_deltanet"
PROC_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class StepSize:
    """Size of the models and of a step."""

    hidden_size: int = 256
    layers: int = 2
    head_dim: int = 64
    vocab_size: int = 1024
    tokens: int = 8192
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)

    def configs(self, mixers: Sequence[str]) -> dict[str, MomentumDeltaNetConfig]:
        """One config per mixer, all with as many parameters as attention's."""
        return equal_size_configs(
            {name: {"mixer": name} for name in mixers},
            BASELINE,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_heads=self.hidden_size // self.head_dim,
            head_dim=self.head_dim,
            expand_v=1,
            vocab_size=self.vocab_size,
            intermediate_size=4 * self.hidden_size,
            use_cache=False,
        )


def make_step(model: MomentumDeltaNetForCausalLM, batch: torch.Tensor) -> Callable[[], None]:
    """A call that does one training step, with memory kept between steps as in ``mdn train``."""
    keep_freed_memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_memory(step: Callable[[], object]) -> float:
    """Bytes a step needs beyond what is already allocated: allocator statistics on a GPU, resident memory on a CPU.

    NaN where the system does not report it (it takes Linux' /proc).
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not PROC_RESET.exists():
        return math.nan
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # else memory freed by the last step would hide what this one needs
    before = _resident("VmRSS")
    PROC_RESET.write_text("5")  # the high-water mark starts again from here
    step()
    return max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: peak memory can be measured on Linux only")


def measure(mixers: Sequence[str], size: StepSize, repeats: int, budget_seconds: float) -> list[dict[str, Any]]:
    """One row per mixer and length; attention is measured with them even if it was not requested.

    ``ratio`` is the speed over that of attention at the same length (above 1 is faster), ``peak_bytes`` the memory that
    a step needs on top of weights and optimiser.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: dict[str, Any] = {}
    for name, config in size.configs([*dict.fromkeys([*mixers, BASELINE])]).items():
        torch.manual_seed(0)
        model: Any = MomentumDeltaNetForCausalLM(config)
        models[name] = model.to(device)
    rows = []
    for length in size.lengths:
        batch = torch.randint(size.vocab_size, (max(size.tokens // length, 1), length), device=device)
        steps: dict[str, Callable[[], object]] = {name: make_step(model, batch) for name, model in models.items()}
        seconds = interleaved(steps, repeats, budget_seconds, label=f"T = {length}")
        rows += [
            {
                "mixer": name,
                "length": length,
                "seconds": seconds[name],
                "tokens_per_second": batch.numel() / seconds[name],
                "ratio": seconds[BASELINE] / seconds[name],
                "peak_bytes": peak_memory(steps[name]),
                "parameters": model.num_parameters(),
            }
            for name, model in models.items()
        ]
    return rows


MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
SHARES = ("products", "rule", "rest")


def compare_with_torch(size: StepSize, repeats: int, budget_seconds: float) -> dict[str, Any]:
    """A step of MDN as it is, and with all around the rule in plain torch, from the same weights and with the same
    optimiser: tokens per second, shares of the time, and the loss after the same number of steps."""
    config = size.configs([REFERENCE])[REFERENCE]
    length = size.lengths[0]
    torch.manual_seed(0)
    batch = torch.randint(size.vocab_size, (max(size.tokens // length, 1), length))
    models: dict[str, Any] = {}
    for name in ("native", "torch"):
        torch.manual_seed(0)
        models[name] = MomentumDeltaNetForCausalLM(config)
    plain = make_step(models["torch"], batch)

    def before() -> None:
        with definitions_only():
            plain()

    steps: dict[str, Callable[[], object]] = {"native": make_step(models["native"], batch), "torch": before}
    seconds = interleaved(steps, repeats, budget_seconds, label="MDN, native and torch")
    facts = {}
    for name, model in models.items():
        with torch.no_grad():
            loss = float(model(input_ids=batch, labels=batch, use_cache=False).loss)
        shares = shares_of(steps[name])
        facts[name] = {"tokens_per_second": batch.numel() / seconds[name], "loss": loss, **shares}
    return {"length": length, "rows": facts}


def shares_of(step: Callable[[], object]) -> dict[str, float]:
    """Of the time of one step: matrix products, the rule, everything else."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    products = sum(event.self_cpu_time_total for event in events if event.key in MATRIX_PRODUCTS)
    rule = sum(event.self_cpu_time_total for event in events if event.key.startswith("mdn::"))
    return {"products": products / total, "rule": rule / total, "rest": 1 - (products + rule) / total}


def profile_recipe(name: str, most_tokens: int) -> dict[str, Any]:
    """Shares of the time of one training step of a recipe's model, with at most ``most_tokens`` tokens in it."""
    recipe = load_recipe(name, [])
    training = recipe.training
    length = min(training.sequence_length, most_tokens)
    rows = max(min(training.batch_tokens, most_tokens) // length, 1)
    config = model_config(recipe, vocabulary(recipe.tokenizer), end_id=0)
    torch.manual_seed(0)
    step = make_step(MomentumDeltaNetForCausalLM(config), torch.randint(config.vocab_size, (rows, length)))
    step()  # the first step allocates memory and the optimiser's state
    started = time.perf_counter()
    shares = shares_of(step)
    seconds = time.perf_counter() - started
    return {"recipe": name, "length": length, "tokens": rows * length, "seconds": seconds, **shares}


def profile_table(profiles: Sequence[dict[str, Any]]) -> Table:
    lines = [
        [p["recipe"], f"{p['tokens']:,} tokens, T = {p['length']:,}", *(f"{p[key]:.1%}" for key in SHARES)]
        for p in profiles
    ]
    header = ["recipe", "step", "matrix products", "rule", "everything else"]
    return Table("where the time of a training step goes", header, lines)


def comparison_table(compared: dict[str, Any]) -> Table:
    rows = compared["rows"]
    lines = [
        [name, f"{row['tokens_per_second']:,.0f}", *(f"{row[key]:.1%}" for key in SHARES), f"{row['loss']:.4f}"]
        for name, row in rows.items()
    ]
    faster = rows["native"]["tokens_per_second"] / rows["torch"]["tokens_per_second"]
    title = f"MDN at T = {compared['length']}: around the rule native or torch; native is {faster:.2f} times as fast"
    return Table(title, ["", "tokens/s", "matrix products", "rule", "everything else", "loss"], lines)


def against_reference(rows: list[dict[str, Any]]) -> Table | None:
    """Speed of every mixer over MDN's, by length; None without MDN."""
    lengths = sorted({row["length"] for row in rows})
    speed = {(row["mixer"], row["length"]): row["tokens_per_second"] for row in rows}
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    if REFERENCE not in mixers:
        return None
    lines = [[name, *(f"{speed[name, n] / speed[REFERENCE, n]:.2f}" for n in lengths)] for name in mixers]
    return Table("training step: speed over MDN's by sequence length", ["mixer", *(f"{n:,}" for n in lengths)], lines)


def tables(content: dict[str, Any]) -> list[Table]:
    """Tokens per second by length, every mixer."""
    rows = content["rows"]
    lengths = sorted({row["length"] for row in rows})
    lines = []
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        mine = {row["length"]: row for row in rows if row["mixer"] == mixer}
        cells = [f"{mine[n]['tokens_per_second']:,.0f} ({mine[n]['ratio']:.2f})" for n in lengths]
        memory, parameters = mine[lengths[-1]]["peak_bytes"] / 2**20, mine[lengths[-1]]["parameters"] / 1e6
        lines.append([mixer, *cells, f"{memory:,.0f}", f"{parameters:.2f} M"])
    header = ["mixer", *(f"{n:,}" for n in lengths), f"MiB of a step at {lengths[-1]:,}", "parameters"]
    speeds = Table("training step: tokens per second (ratio to attention) by sequence length", header, lines)
    relative = against_reference(rows)
    compared = content.get("compared")
    return [
        speeds,
        *([] if relative is None else [relative]),
        *([] if compared is None else [comparison_table(compared)]),
        *([profile_table(content["profiles"])] if content.get("profiles") else []),
    ]


def draw(content: dict[str, Any]) -> Any:
    """Speed relative to attention, and peak memory, over the sequence length."""
    rows = content["rows"]
    lengths = sorted({row["length"] for row in rows})
    fig, axes = figure("Training step at equal size", "sequence length", columns=2, size=(9.5, 4.0))
    for axis, name, unit, title in (
        (axes.flat[0], "ratio", 1, "speed, attention = 1"),
        (axes.flat[1], "peak_bytes", 2**20, "memory of a step, MiB"),
    ):
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            mine = [row for row in rows if row["mixer"] == mixer]
            values = [row[name] / unit for row in mine]
            axis.plot([row["length"] for row in mine], values, "o-", label=mixer, color=MIXER_COLOURS[mixer])
        axis.set(title=title, ylim=(0, None))
        doubling_axis(axis, lengths)
    legend_outside(fig, axes.flat[0])
    return fig


def check_mixers(names: Sequence[str]) -> list[str]:
    """The names, after refusing unknown ones."""
    unknown = [name for name in names if name not in MIXERS]
    if unknown:
        raise ValueError(f"--mixers: unknown {', '.join(unknown)}; expected some of {', '.join(MIXERS)}")
    return list(names)

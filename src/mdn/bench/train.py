"""Tokens per second of a whole training step (forward, backward, clipping, AdamW) for every mixer, at equal size.

All mixers stand in the same backbone; the width of the MLP is set so that the models have equally many parameters.
Every length has the same number of tokens per step. Times are compared within one process, in turn, as ratios to
attention.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mdn.bench.timing import interleaved
from mdn.common.plots import MIXER_COLOURS, figure, save_figure
from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM

BASELINE = "attention"


@dataclass(frozen=True)
class Setting:
    """Size of the models and of a step."""

    hidden_size: int = 256
    layers: int = 2
    head_dim: int = 64
    vocab_size: int = 1024
    tokens: int = 8192
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Row:
    mixer: str
    length: int
    seconds: float
    tokens_per_second: float
    ratio: float
    """speed over that of attention at the same length; above 1 is faster"""
    peak_bytes: int
    """memory that a step needs on top of weights and optimiser"""
    parameters: int


def config_of(mixer: str, setting: Setting, mlp: int) -> MomentumDeltaNetConfig:
    return MomentumDeltaNetConfig(
        mixer=mixer,
        hidden_size=setting.hidden_size,
        num_hidden_layers=setting.layers,
        num_heads=setting.hidden_size // setting.head_dim,
        head_dim=setting.head_dim,
        expand_v=1,
        vocab_size=setting.vocab_size,
        intermediate_size=mlp,
        use_cache=False,
    )


def _parameters(config: MomentumDeltaNetConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MomentumDeltaNetForCausalLM(config).parameters())


def equal_size_config(mixer: str, setting: Setting, target: int) -> MomentumDeltaNetConfig:
    """The config whose MLP width brings the model closest to `target` parameters."""
    per_unit = 3 * setting.hidden_size * setting.layers  # gate, up and down projection
    mlp = 4 * setting.hidden_size
    missing = target - _parameters(config_of(mixer, setting, mlp))
    mlp = max(8, mlp + round(missing / per_unit))
    return config_of(mixer, setting, mlp)


def make_step(model: MomentumDeltaNetForCausalLM, batch: torch.Tensor) -> Callable[[], None]:
    """A call that does one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()

    def step() -> None:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_memory(step: Callable[[], object]) -> int:
    """Bytes a step needs beyond what is there before it: allocator statistics on a GPU, resident memory on a CPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # else memory freed by the last step would hide what this one needs
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    step()
    return max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: peak memory can be measured on Linux only")


def measure(mixers: Sequence[str], setting: Setting, repeats: int, budget_seconds: float) -> list[Row]:
    """One row per mixer and length; attention is measured with them even if it was not asked for."""
    names = [*dict.fromkeys([*mixers, BASELINE])]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = _parameters(config_of(BASELINE, setting, 4 * setting.hidden_size))
    models: dict[str, MomentumDeltaNetForCausalLM] = {}
    for name in names:
        torch.manual_seed(0)
        model: Any = MomentumDeltaNetForCausalLM(equal_size_config(name, setting, target))
        models[name] = model.to(device)
    rows = []
    for length in setting.lengths:
        batch = torch.randint(setting.vocab_size, (max(setting.tokens // length, 1), length), device=device)
        steps: dict[str, Callable[[], object]] = {name: make_step(model, batch) for name, model in models.items()}
        seconds = interleaved(steps, repeats, budget_seconds, label=f"T = {length}")
        for name in names:
            size = sum(p.numel() for p in models[name].parameters())
            speed = batch.numel() / seconds[name]
            ratio = seconds[BASELINE] / seconds[name]
            rows.append(Row(name, length, seconds[name], speed, ratio, peak_memory(steps[name]), size))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'mixer':<18} {'T':>6} {'tokens/s':>10} {'ratio':>7} {'peak MB':>9} {'parameters':>11}"]
    for row in rows:
        lines.append(
            f"{row.mixer:<18} {row.length:>6} {row.tokens_per_second:>10,.0f} {row.ratio:>7.2f} "
            f"{row.peak_bytes / 1e6:>9,.0f} {row.parameters:>11,}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path, command: str) -> list[Path]:
    """Speed relative to attention, and peak memory, over the sequence length."""
    fig, axes = figure("training step", "sequence length", columns=2, size=(9.5, 4.0))
    panels: list[tuple[Any, str, Callable[[Row], float]]] = [
        (axes.flat[0], "speed, attention = 1", lambda row: row.ratio),
        (axes.flat[1], "memory of a step, MB", lambda row: row.peak_bytes / 1e6),
    ]
    for axis, title, value in panels:
        for mixer in dict.fromkeys(row.mixer for row in rows):
            chosen = [row for row in rows if row.mixer == mixer]
            lengths = [row.length for row in chosen]
            axis.plot(lengths, [value(row) for row in chosen], marker="o", label=mixer, color=MIXER_COLOURS[mixer])
        axis.set(title=title, ylabel="")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row.length for row in rows}), [str(n) for n in sorted({row.length for row in rows})])
    fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return save_figure(fig, path, command)


def as_json(rows: Sequence[Row], setting: Setting, machine: dict[str, object]) -> dict[str, Any]:
    return {"machine": machine, "setting": asdict(setting), "rows": [asdict(row) for row in rows]}


def check_mixers(names: Sequence[str]) -> list[str]:
    """The names, after refusing unknown ones."""
    unknown = [name for name in names if name not in MIXERS]
    if unknown:
        raise ValueError(f"--mixers: unknown {', '.join(unknown)}; expected some of {', '.join(MIXERS)}")
    return list(names)

"""Oscillating signals: a resonator that impulses excite, and damped sinusoids to be continued from their beginning.

A batch has inputs ``[B, T, channels]``, targets ``[B, T]`` and weights ``[B, T]``, 0 where nothing is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Signals(NamedTuple):
    inputs: Tensor  # [B, T, channels]
    targets: Tensor  # [B, T]
    weights: Tensor  # [B, T]


class Mode(NamedTuple):
    """A damped oscillation radius^t cos(2 pi t / period)."""

    period: float
    radius: float


MODES = (Mode(12.0, 0.90), Mode(32.0, 0.985))
"""of the resonator: a fast oscillation that fades within two turns, and a slow one that keeps 62 % a turn"""
IMPULSES = 0.15
"""share of the tokens that excite it"""
UNASKED = 16
"""first tokens, where little has been excited yet"""


def resonator(number: int, length: int, generator: torch.Generator) -> Signals:
    """Impulses of random height u in, y_t = sum over modes and s <= t of u_s radius^(t - s) cos(2 pi (t - s) / period).

    Computed as a recurrence, one complex number per mode: z_t = radius exp(2 pi i / period) z_{t-1} + u_t, y = Re z.
    """
    struck = torch.rand(number, length, generator=generator) < IMPULSES
    u = torch.randn(number, length, generator=generator) * struck
    poles = [mode.radius * complex(math.cos(a), math.sin(a)) for mode in MODES for a in [2 * math.pi / mode.period]]
    turn = torch.tensor(poles, dtype=torch.complex128)
    z = torch.zeros(number, len(poles), dtype=torch.complex128)
    outputs = []
    for t in range(length):
        z = turn * z + u[:, t : t + 1]
        outputs.append(z.real.sum(dim=1))
    weights = torch.ones(number, length)
    weights[:, :UNASKED] = 0
    return Signals(u.unsqueeze(2), torch.stack(outputs, dim=1).float(), weights)


SEEN = 32
"""tokens of a sinusoid that are shown"""
PERIODS = (12.0, 48.0)
LIFETIMES = (128.0, 512.0)
"""tokens until the amplitude has fallen to 1 / e"""
NOISE = 0.05


def continued_sinusoid(number: int, length: int, generator: torch.Generator) -> Signals:
    """exp(-t / lifetime) sin(2 pi t / period + phase), all three unknown; SEEN noisy tokens, then blanks.

    Channels: the value (0 in a blank) and 1 in a blank. The target, in the blanks, is the signal without noise.
    """
    t = torch.arange(length)
    period = _log_uniform(number, PERIODS, generator)
    lifetime = _log_uniform(number, LIFETIMES, generator)
    phase = 2 * math.pi * torch.rand(number, 1, generator=generator)
    signal = torch.exp(-t / lifetime) * torch.sin(2 * math.pi * t / period + phase)
    noise = NOISE * torch.randn(number, length, generator=generator)
    blank = (t >= SEEN).float().expand(number, -1)
    return Signals(torch.stack([(signal + noise) * (1 - blank), blank], dim=2), signal, blank)


SIGNALS: dict[str, Callable[[int, int, torch.Generator], Signals]] = {
    "resonator": resonator,
    "continuation": continued_sinusoid,
}
CHANNELS = {"resonator": 1, "continuation": 2}
CONSTANTS: dict[str, dict[str, Any]] = {
    "resonator": {"modes": MODES, "impulses": IMPULSES, "unasked": UNASKED},
    "continuation": {"seen": SEEN, "periods": PERIODS, "lifetimes": LIFETIMES, "noise": NOISE},
}
"""what decides the signals beside the seed: part of the settings of a cell"""


def _log_uniform(number: int, bounds: tuple[float, float], generator: torch.Generator) -> Tensor:
    """[number, 1]"""
    low, high = (math.log(bound) for bound in bounds)
    return torch.exp(low + (high - low) * torch.rand(number, 1, generator=generator))

"""Checks that any token mixer, yours included, meets the contract with the backbone.

    from mdn.testing import check_mixer

    check_mixer(MyMixer, hidden_size=64, num_heads=4)

builds the mixer, fills it with random values and raises :class:`MixerError` with the first property that does not hold,
how far off it is, and what to look at. It takes about a second and needs no GPU. The properties, in order:

| property | what must hold |
|---|---|
| protocol | a ``Mixer``; ``[B, T, D]`` in and out, the same dtype, finite |
| initialisation | every parameter has a row in the table of ``mdn.layers.init``, which fills all of it |
| repeatability | the same call gives the same output: nothing is remembered outside the cache |
| rows | no row of a batch sees another one |
| causality | a token changes no earlier output, and does change its own |
| packing | sequences in a pack (``layout.boundaries``) give what they give alone; empty ones and single tokens too |
| padding | rows of a padded batch give what they give alone |
| decoding | pieces and single tokens with a cache give what the whole sequence gives |
| padded decoding | the same after a left-padded prefill |
| state shapes | ``state_shapes()`` tells what the cache really holds |
| gradients | every parameter has one, and they agree with finite differences |
| saving | a state dict carries everything that the output depends on |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdn.layers.init import initialise, initialiser_name
from mdn.layers.mixer import RECURRENT_LAYER_TYPE, Mixer

ROWS, TIME = 3, 21
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
STEP = 1e-5  # of the finite differences


class MixerError(AssertionError):
    """``property`` is the name of what does not hold."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.property = name


def check_mixer(
    mixer: Callable[..., Mixer],
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Raises :class:`MixerError` if a property of the table above does not hold.

    ``mixer`` is a class, or any function, that takes ``hidden_size``, ``layer_idx`` and ``options``. ``tolerance`` is
    relative to the largest expected value (default: 1e-7 in float64, 1e-4 in float32). Finite differences need float64
    and are skipped in float32.
    """
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance

    def build() -> Mixer:
        return mixer(hidden_size=hidden_size, layer_idx=0, **options)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        subject = MixerUnderTest(build, _protocol(build, hidden_size, dtype), hidden_size, dtype, tolerance)
        for name, check in PROPERTIES.items():
            try:
                check(subject)
            except MixerError:
                raise
            except Exception as error:
                raise MixerError(name, f"{type(error).__name__}: {error}") from error


@dataclass
class MixerUnderTest:
    """A mixer with random parameters, the size of the inputs and the tolerance of the comparisons."""

    build: Callable[[], Mixer]
    layer: Mixer
    hidden_size: int
    dtype: torch.dtype
    tolerance: float

    def states(self, rows: int = ROWS, time: int = TIME) -> Tensor:
        """Random hidden states ``[rows, time, D]``."""
        return torch.randn(rows, time, self.hidden_size, dtype=self.dtype)

    def compare(self, name: str, found: Tensor, expected: Tensor, message: str) -> None:
        if found.shape != expected.shape:
            raise MixerError(name, f"{message}: shape {list(found.shape)} instead of {list(expected.shape)}")
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((found - expected).abs().max()) if expected.numel() else 0.0
        if not error <= self.tolerance * max(scale, 1e-3):
            raise MixerError(name, f"{message}: off by {error:.2g} where the largest value is {scale:.2g}")

    def cache(self) -> Any:
        """An empty transformers cache with one layer of the kind that the mixer needs."""
        from transformers import DynamicCache

        from mdn.models import MomentumDeltaNetConfig

        recurrent = self.layer.cache_type == RECURRENT_LAYER_TYPE
        config = MomentumDeltaNetConfig(
            mixer="momentum_deltanet" if recurrent else "attention",
            num_hidden_layers=1,
            window_size=None if recurrent else getattr(self.layer, "window_size", None),
        )
        return DynamicCache(config=config)


# ---------------------------------------------------------------------------------------------------------- properties


def _protocol(build: Callable[[], Mixer], hidden_size: int, dtype: torch.dtype) -> Mixer:
    """The mixer, with random parameters."""
    layer = build()
    if not isinstance(layer, Mixer):
        raise MixerError("protocol", f"expected a subclass of mdn.layers.Mixer, got {type(layer).__name__}")
    layer = layer.to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():  # no parameter may hide behind an initial value of zero
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(2, 5, hidden_size, dtype=dtype)
        y = layer(x)
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        shown = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise MixerError("protocol", f"expected a tensor like its input, {x.dtype} {list(x.shape)}, got {shown}")
    if not bool(y.isfinite().all()):
        raise MixerError("protocol", "the output is not finite")
    return layer


def _initialisation(subject: MixerUnderTest) -> None:
    layer = subject.build()
    for prefix, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            try:
                initialiser_name(module, name)
            except ValueError as error:
                raise MixerError("initialisation", str(error)) from None
            with torch.no_grad():
                parameter.fill_(math.nan)
        initialise(module)
        for name, parameter in module.named_parameters(recurse=False):
            if not bool(parameter.isfinite().all()):
                raise MixerError(
                    "initialisation", f"{prefix}.{name} is not finite after its initialiser ran".lstrip(".")
                )


@torch.no_grad()
def _repeatability(subject: MixerUnderTest) -> None:
    x = subject.states()
    first = subject.layer(x)
    subject.layer(subject.states())
    subject.compare("repeatability", subject.layer(x), first, "a second call with the same input differs")


@torch.no_grad()
def _rows(subject: MixerUnderTest) -> None:
    x = subject.states()
    expected = torch.cat([subject.layer(row) for row in x.split(1)])
    subject.compare("rows", subject.layer(x), expected, "a row differs from the same row in a batch of its own")


@torch.no_grad()
def _causality(subject: MixerUnderTest) -> None:
    x = subject.states()
    before = subject.layer(x)
    for place in (1, TIME // 2, TIME - 1):
        other = x.clone()
        other[:, place] += subject.states(ROWS, 1)[:, 0]
        after = subject.layer(other)
        message = f"changing token {place} changes earlier outputs"
        subject.compare("causality", after[:, :place], before[:, :place], message)
        if torch.equal(after[:, place], before[:, place]):
            raise MixerError("causality", f"changing token {place} does not change its own output")


@torch.no_grad()
def _packing(subject: MixerUnderTest) -> None:
    lengths = [6, 1, 0, 9]
    x = subject.states(1, sum(lengths))
    expected = torch.cat([subject.layer(piece) for piece in x.split(lengths, dim=1) if piece.shape[1]], dim=1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    found = subject.layer(x, cu_seqlens=cu_seqlens)
    message = "sequences of a pack differ from the same ones alone (layout.boundaries says where they begin)"
    subject.compare("packing", found, expected, message)


def _mask() -> Tensor:
    """Rows of 8, 21 and 1 tokens, padded on the left."""
    return torch.arange(TIME) >= TIME - torch.tensor([8, TIME, 1]).unsqueeze(-1)


@torch.no_grad()
def _padding(subject: MixerUnderTest) -> None:
    x = subject.states()
    for side, mask in {"left": _mask(), "right": _mask().flip(1)}.items():
        found = subject.layer(x, attention_mask=mask)
        for row, kept in enumerate(mask):
            message = f"a row with padding on the {side} differs from its tokens alone"
            subject.compare("padding", found[row, kept], subject.layer(x[row : row + 1, kept])[0], message)


@torch.no_grad()
def _decoding(subject: MixerUnderTest) -> None:
    x = subject.states()
    whole = subject.layer(x)
    for sizes in ([7, 1, 1, 3, 1, 8], [1] * TIME):
        cache = subject.cache()
        found = torch.cat([subject.layer(piece, past_key_values=cache) for piece in x.split(sizes, dim=1)], dim=1)
        message = f"pieces of {sizes} tokens with a cache differ from the whole sequence (state reads and writes it)"
        subject.compare("decoding", found, whole, message)


@torch.no_grad()
def _padded_decoding(subject: MixerUnderTest) -> None:
    x, mask = subject.states(), _mask()
    whole, cache, found, seen = subject.layer(x, attention_mask=mask), subject.cache(), [], 0
    for piece in x.split([15, 1, 3, 1, 1], dim=1):
        seen += piece.shape[1]
        found.append(subject.layer(piece, past_key_values=cache, attention_mask=mask[:, :seen]))
    message = "left-padded pieces with a cache differ from the whole batch"
    subject.compare("padded decoding", torch.cat(found, dim=1), whole, message)


@torch.no_grad()
def _state_shapes(subject: MixerUnderTest) -> None:
    promised = sum(math.prod(state.shape) for state in subject.layer.state_shapes().values())
    if subject.layer.cache_type != RECURRENT_LAYER_TYPE:
        return  # keys and values grow with the context
    cache = subject.cache()
    subject.layer(subject.states(), past_key_values=cache)
    states = (*cache.layers[0].conv_states.values(), *cache.layers[0].recurrent_states.values())
    held = sum(state[0].numel() for state in states if state is not None)
    if held != promised:
        raise MixerError("state shapes", f"the cache holds {held} numbers per sequence, state_shapes() says {promised}")


def _gradients(subject: MixerUnderTest) -> None:
    layer, x = subject.layer, subject.states(2, 7).requires_grad_()
    inputs = {"hidden_states": x, **dict(layer.named_parameters())}
    weights = torch.randn_like(x)
    grads = torch.autograd.grad((layer(x) * weights).sum(), list(inputs.values()), allow_unused=True)
    for name, grad in zip(inputs, grads):
        if grad is None or not bool(grad.isfinite().all()) or float(grad.abs().max()) == 0:
            kind = (
                "no gradient" if grad is None else "a gradient of zero" if bool(grad.isfinite().all()) else "NaN or inf"
            )
            raise MixerError("gradients", f"{name} has {kind}")
    if subject.dtype != torch.float64:
        return
    directions = [torch.randn_like(value) for value in inputs.values()]
    slope = sum(float((grad * direction).sum()) for grad, direction in zip(grads, directions))

    @torch.no_grad()
    def moved(step: float) -> float:
        for value, direction in zip(inputs.values(), directions):
            value.add_(step * direction)
        return float((layer(x) * weights).sum())

    difference = moved(STEP) - moved(-2 * STEP)
    moved(STEP)
    found = difference / (2 * STEP)
    if abs(found - slope) > 1e-5 * max(1.0, abs(slope)):
        raise MixerError("gradients", f"along a random direction they say {slope:.6g}, finite differences {found:.6g}")


@torch.no_grad()
def _saving(subject: MixerUnderTest) -> None:
    x = subject.states()
    other = subject.build().to(subject.dtype)
    other.load_state_dict({name: value.clone() for name, value in subject.layer.state_dict().items()})
    subject.compare("saving", other(x), subject.layer(x), "a new mixer with the loaded state dict differs")


PROPERTIES: dict[str, Callable[[MixerUnderTest], None]] = {
    "initialisation": _initialisation,
    "repeatability": _repeatability,
    "rows": _rows,
    "causality": _causality,
    "packing": _packing,
    "padding": _padding,
    "decoding": _decoding,
    "padded decoding": _padded_decoding,
    "state shapes": _state_shapes,
    "gradients": _gradients,
    "saving": _saving,
}

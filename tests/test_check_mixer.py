"""`mdn.testing.check_mixer`: all our mixers pass, and each kind of broken one is found by the right property."""

import functools

import pytest
import torch
from torch import Tensor, nn

from mdn.layers import MIXERS, LayerState, Mixer, StateShape, TokenLayout, init
from mdn.testing import MixerError, check_mixer

HEADS = {"head_dim": 8, "num_heads": 2}
OPTIONS: dict[str, dict] = {
    **dict.fromkeys(("momentum_deltanet", "gated_deltanet", "comba", "kda"), HEADS),
    **{name: {"num_heads": 2} for name in ("deltanet", "gla", "linear_attention")},
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "mamba2": {"head_dim": 8, "state_size": 8},
    "rwkv7": {"head_dim": 8, "num_hidden_layers": 2},
}
VARIANTS = [
    *OPTIONS.items(),
    (
        "momentum_deltanet",
        {**HEADS, "num_v_heads": 4, "use_short_conv": False, "use_gate": False},
    ),
    ("momentum_deltanet", {**HEADS, "use_momentum": False, "mode": "fused_recurrent"}),
    ("momentum_deltanet", {**HEADS, "momentum": "quasi_hyperbolic"}),
    ("attention", {"num_heads": 4, "window_size": 5}),
    ("attention", {"num_heads": 4, "window_size": 1}),
    ("linear_attention", {"num_heads": 2, "feature_map": "elu", "do_feature_map_norm": True}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_our_mixers_keep_every_promise(name, options):
    check_mixer(MIXERS[name], hidden_size=32, **options)


def test_a_factory_and_float32_work_too():
    check_mixer(
        functools.partial(MIXERS["gated_deltanet"], head_dim=8), hidden_size=32, num_heads=2, dtype=torch.float32
    )


# ------------------------------------------------------------------------------------- a mixer as a user would write it


class MovingAverage(Mixer):
    """y_t = W (d * mean_t + (1 - d) * x_t), where mean_t is the mean of the tokens up to t; d per channel."""

    def __init__(self, hidden_size: int, layer_idx: int | None = None):
        super().__init__(hidden_size, layer_idx)
        self.share = nn.Parameter(torch.full((hidden_size,), 0.5))
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        sums, counts = self.sums(hidden_states, layout, state)
        return self.o_proj(self.share * sums / counts + (1 - self.share) * hidden_states)

    def sums(self, x: Tensor, layout: TokenLayout, state: LayerState | None) -> tuple[Tensor, Tensor]:
        """Sums over each sequence's tokens so far, and how many they are; the cache holds both, [N, D + 1]."""
        ones = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        before = None if state is None else state.initial_recurrent(0)
        rows = self.sequences(ones, layout)
        if before is None:
            before = x.new_zeros(len(rows), x.shape[-1] + 1)
        totals = [row.cumsum(0) + start for row, start in zip(rows, before.to(x.dtype))]
        if state is not None:
            state.write_recurrent(torch.stack([t[-1] if len(t) else b for t, b in zip(totals, before.to(x.dtype))]), 0)
        joined = torch.stack(totals) if layout.boundaries is None else torch.cat(totals)[None]
        return joined[..., :-1], joined[..., -1:]

    def sequences(self, x: Tensor, layout: TokenLayout) -> list[Tensor]:
        return list(x) if layout.boundaries is None else list(x[0].split(list(layout.boundaries.lengths)))

    def state_shapes(self) -> dict[str, StateShape]:
        return {"sums": StateShape((self.hidden_size + 1,), None)}

    def flops_per_token(self, context: int) -> int:
        return 4 * self.hidden_size


class IgnoresLayout(MovingAverage):
    def mix(self, hidden_states, layout, state):
        dense = TokenLayout((hidden_states.shape[0], hidden_states.shape[1]))
        return super().mix(hidden_states, dense, state if layout.boundaries is None else None)


class IgnoresState(MovingAverage):
    def mix(self, hidden_states, layout, state):
        return super().mix(hidden_states, layout, None)


class IgnoresMaskedState(MovingAverage):
    """Starts padded pieces from nothing."""

    def mix(self, hidden_states, layout, state):
        return super().mix(hidden_states, layout, state if layout.boundaries is None else None)


class SeesTheFuture(MovingAverage):
    def mix(self, hidden_states, layout, state):
        return super().mix(hidden_states + 0.01 * hidden_states.mean(1, keepdim=True), layout, state)


class SeesOtherRows(MovingAverage):
    def mix(self, hidden_states, layout, state):
        return super().mix(hidden_states + 0.01 * hidden_states.cumsum(0), layout, state)


class Remembers(MovingAverage):
    last = 0.0

    def mix(self, hidden_states, layout, state):
        y = super().mix(hidden_states + self.last, layout, state)
        self.last = float(y.mean())
        return y


class IgnoresTheToken(MovingAverage):
    def mix(self, hidden_states, layout, state):
        return super().mix(nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1], layout, state)


class HasADeadParameter(MovingAverage):
    def __init__(self, hidden_size, layer_idx=None):
        super().__init__(hidden_size, layer_idx)
        self.unused = nn.Linear(3, 3)


class CutsGradients(MovingAverage):
    def mix(self, hidden_states, layout, state):
        sums, counts = self.sums(hidden_states.detach(), layout, state)
        return self.o_proj(self.share * sums / counts + (1 - self.share) * hidden_states)


class HidesABuffer(MovingAverage):
    def __init__(self, hidden_size, layer_idx=None):
        super().__init__(hidden_size, layer_idx)
        self.register_buffer("offset", torch.randn(hidden_size), persistent=False)

    def mix(self, hidden_states, layout, state):
        return super().mix(hidden_states + self.offset, layout, state)


class MisstatesItsState(MovingAverage):
    def state_shapes(self):
        return {"sums": StateShape((self.hidden_size,), None)}


class ReturnsATuple(MovingAverage):
    def mix(self, hidden_states, layout, state):
        return super().mix(hidden_states, layout, state), None


class HasNoInitialiser(MovingAverage):
    pass


BROKEN = {
    IgnoresLayout: "packing",
    IgnoresState: "decoding",
    IgnoresMaskedState: "padded decoding",
    SeesTheFuture: "causality",
    IgnoresTheToken: "causality",
    SeesOtherRows: "rows",
    Remembers: "repeatability",
    HasADeadParameter: "gradients",
    CutsGradients: "gradients",
    HidesABuffer: "saving",
    MisstatesItsState: "state shapes",
    ReturnsATuple: "protocol",
    HasNoInitialiser: "initialisation",
}


@pytest.fixture(autouse=True)
def rows_of_the_table(monkeypatch):
    """What a user adds for a parameter of their own."""
    kinds = [MovingAverage, *(kind for kind in BROKEN if kind is not HasNoInitialiser)]
    monkeypatch.setattr(init, "TABLE", [*((kind.__name__, "share", "ones") for kind in kinds), *init.TABLE])


def test_a_mixer_of_a_user_passes():
    check_mixer(MovingAverage, hidden_size=12)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_what_is_broken_is_named(kind):
    with pytest.raises(MixerError, match=f"^{BROKEN[kind]}: ") as caught:
        check_mixer(kind, hidden_size=12)
    assert caught.value.property == BROKEN[kind]


def test_a_module_that_is_no_mixer_is_refused():
    with pytest.raises(MixerError, match=r"protocol: expected a subclass of mdn\.layers\.Mixer, got Linear"):
        check_mixer(lambda hidden_size, layer_idx: nn.Linear(hidden_size, hidden_size), hidden_size=12)

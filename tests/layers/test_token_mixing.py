"""What surrounds RWKV-7's rule, against what it is short for: natively in float32, and the definition in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers import make_layout
from mdn.layers.rwkv7 import HeadGroupNorm, RWKV7Attention, TokenShift
from mdn.layers.token_mixing import SLOWEST_LOG_DECAY, mixed_output, mixed_streams, rule_inputs
from mdn.ops.fused import definitions_only, is_native

Tensors = Sequence[Tensor]

SHAPES = [(1, 1, 1, 3), (2, 65, 3, 5), (1, 7, 2, 16), (3, 40, 2, 33), (2, 64, 4, 64)]
"""B, T, H, D"""


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results_and_gradients(function: Callable[..., Tensors], tensors: Tensors, dtype: torch.dtype) -> list[Tensor]:
    given = [x.detach().to(dtype, copy=True).requires_grad_() for x in tensors]
    results = function(*given)
    grads = [random(*y.shape, seed=50 + i).to(dtype) for i, y in enumerate(results)]
    return [*(y.detach() for y in results), *torch.autograd.grad(list(results), given, grads)]


def check(
    function: Callable[..., Tensors], expected: Callable[..., Tensors], tensors: Tensors, tolerance: float = 5e-6
) -> None:
    """Float32 against ``expected`` in float64, relative to the largest value of each tensor; gradients too."""
    exact = results_and_gradients(expected, tensors, torch.float64)
    for dtype, allowed in ((torch.float32, tolerance), (torch.float64, 1e-12)):
        found = results_and_gradients(function, tensors, dtype)
        for a, b in zip(found, exact, strict=True):
            assert a.shape == b.shape
            assert a.dtype is dtype
            assert float((a.double() - b).abs().max()) <= allowed * float(b.abs().max())
    with torch.no_grad():
        without = function(*tensors)
    found = results_and_gradients(function, tensors, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(without, found))


# ------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 171, 8), (2, 256, 35)])
def test_streams_and_their_gradients(count: int, shape: tuple[int, ...], every_instruction_set: None) -> None:
    mixes = [random(1, 1, shape[-1], seed=2 + i) for i in range(count)]
    tensors = [random(*shape), random(*shape, seed=1), *mixes]
    check(mixed_streams, lambda x, shifted, *mixes: [x + shifted * mix for mix in mixes], tensors)


def test_a_seventh_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="6 streams at most, got 7"):
        mixed_streams(*(random(1, 1, 4) for _ in range(9)))


# -------------------------------------------------------------------------------------------------------- token shift


@pytest.mark.parametrize("lengths", [None, (1, 0, 70, 2, 3, 31)])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_token_shift_is_the_difference_to_the_token_before(
    lengths: tuple[int, ...] | None, has_state: bool, every_instruction_set: None
) -> None:
    channels, sequences = 35, 3 if lengths is None else len(lengths)
    ends = [0, 1, 2, 3] if lengths is None else [0, *itertools.accumulate(lengths)]
    x = random(3, 45, channels) if lengths is None else random(1, ends[-1], channels)
    layout = None if lengths is None else make_layout((1, ends[-1]), cu_seqlens=torch.tensor(ends))
    state = random(sequences, channels, 1, seed=1) if has_state else None

    def expected(x: Tensor) -> list[Tensor]:
        before = x.new_zeros(sequences, channels, 1) if state is None else state.to(x.dtype)
        parts = [*x] if lengths is None else [x[0, a:b] for a, b in itertools.pairwise(ends)]
        moved = [torch.cat([first.mT, part])[: len(part)] for first, part in zip(before, parts)]
        return [(torch.stack(moved) if lengths is None else torch.cat(moved).unsqueeze(0)) - x]

    def shift(x: Tensor) -> list[Tensor]:
        return [TokenShift(channels)(x, layout, None if state is None else state.to(x.dtype))[0]]

    check(shift, expected, [x])


# ----------------------------------------------------------------------------------------------- arguments of the rule


def key_tensors(shape: tuple[int, ...]) -> list[Tensor]:
    B, T, H, D = shape
    projections = [random(B, T, H * D, seed=i, scale=3) for i in range(3)]
    return [*projections, random(H * D, seed=3), random(H * D, seed=4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_arguments_of_the_rule_and_their_gradients(shape: tuple[int, ...], every_instruction_set: None) -> None:
    heads = shape[2]

    def expected(k: Tensor, decay: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor) -> list[Tensor]:
        scaled, rate = (k * k_k).reshape(shape), 1 / (1 + torch.exp(-rate))
        kappa = scaled / scaled.square().sum(-1, keepdim=True).sqrt()
        w, key = SLOWEST_LOG_DECAY / (1 + torch.exp(-decay)), k + k * (rate - 1) * k_a
        return [w.reshape(shape), key.reshape(shape), -kappa, kappa * rate.reshape(shape)]

    check(lambda *given: rule_inputs(*given, heads), expected, key_tensors(shape), 1e-5)


def test_a_key_of_zeros_has_the_gradients_of_the_definition() -> None:
    tensors = key_tensors((1, 3, 2, 5))
    tensors[0][0, 1] = 0
    native = results_and_gradients(lambda *given: rule_inputs(*given, 2), tensors, torch.float32)
    with definitions_only():
        expected = results_and_gradients(lambda *given: rule_inputs(*given, 2), tensors, torch.float32)
    for a, b in zip(native, expected, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- output


def output(o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, *parameters: Tensor) -> Tensor:
    r_k, weight, bias = parameters
    return mixed_output(o, r, k, v, gate, r_k=r_k, weight=weight, bias=bias, eps=1e-3)


def output_tensors(shape: tuple[int, ...]) -> list[Tensor]:
    B, T, H, D = shape
    return [
        *(random(*shape, seed=i) for i in range(4)),
        random(B, T, H * D, seed=4),
        random(H, D, seed=5),
        random(H * D, seed=6),
        random(H * D, seed=7),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_and_its_gradients(shape: tuple[int, ...], every_instruction_set: None) -> None:
    H, D = shape[2:]

    def expected(o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, *parameters: Tensor) -> list[Tensor]:
        r_k, weight, bias = parameters
        normed = F.group_norm(o.reshape(-1, H * D), H, weight, bias, 1e-3).reshape(gate.shape)
        own = torch.einsum("bthd,bthd,hd->bth", r, k, r_k).unsqueeze(-1) * v
        return [(normed + own.flatten(-2)) * gate]

    check(lambda *given: [output(*given)], expected, output_tensors(shape), 1e-5)


# ------------------------------------------------------------------------------------------------------------- shapes


def replaced(tensors: list[Tensor], place: int, other: Tensor) -> list[Tensor]:
    return [*tensors[:place], other, *tensors[place + 1 :]]


STREAMS = [random(2, 5, 6), random(2, 5, 6, seed=1), random(1, 1, 6, seed=2), random(6, seed=3)]
KEYS, OUTPUT = key_tensors((2, 5, 2, 3)), output_tensors((2, 5, 2, 3))
FUNCTIONS: dict[str, Callable[..., Tensors]] = {
    "streams": mixed_streams,
    "keys": lambda *given: rule_inputs(*given, 2),
    "keys of 4 heads": lambda *given: rule_inputs(*given, 4),
    "output": lambda *given: [output(*given)],
}
BROADCAST = [
    ("streams", replaced(STREAMS, 1, random(2, 1, 6))),  # one shift for all tokens
    ("streams", replaced(STREAMS, 2, random(2, 5, 6))),  # a mix of every token's own
    ("streams", replaced(STREAMS, 3, random(1))),
    ("keys", replaced(KEYS, 1, random(1, 1, 6))),  # one decay
    ("keys", replaced(KEYS, 3, random(1))),
    ("keys", replaced(KEYS, 4, random(1, 1, 6))),
    ("output", replaced(OUTPUT, 1, random(2, 5, 1, 3))),  # one r for all heads
    ("output", replaced(OUTPUT, 4, random(2, 1, 6))),  # one gate for all tokens
    ("output", replaced(OUTPUT, 5, random(3))),
    ("output", replaced(OUTPUT, 7, random(1))),
]


@pytest.mark.parametrize(("name", "tensors"), BROADCAST)
def test_shapes_that_torch_broadcasts_are_broadcast(name: str, tensors: list[Tensor]) -> None:
    native = results_and_gradients(FUNCTIONS[name], tensors, torch.float32)
    exact = results_and_gradients(FUNCTIONS[name], tensors, torch.float64)
    for found, expected in zip(native, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("streams", replaced(STREAMS, 1, random(2, 4, 6))),
        ("streams", replaced(STREAMS, 2, random(7))),
        ("keys", replaced(KEYS, 2, random(2, 4, 6))),
        ("keys", replaced(KEYS, 3, random(4))),
        ("keys of 4 heads", KEYS),
        ("output", replaced(OUTPUT, 3, random(2, 4, 2, 3))),
        ("output", replaced(OUTPUT, 6, random(5))),
    ],
)
def test_shapes_that_torch_refuses_are_refused(name: str, tensors: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"must match the size|don't multiply up"):
        FUNCTIONS[name](*tensors)


def test_the_norm_is_the_group_norm() -> None:
    torch.manual_seed(0)
    norm, same = HeadGroupNorm(24, 1e-3, 0.5), nn.GroupNorm(4, 24, 1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    same.load_state_dict(norm.state_dict())
    o, gate = torch.randn(3, 5, 4, 6), torch.ones(3, 5, 24)
    found = norm(o, *torch.zeros(3, *o.shape), gate, torch.ones(4, 6))
    torch.testing.assert_close(found, same(o.reshape(15, 24)).view(3, 5, 24))


# ----------------------------------------------------------------------------------------------------------- all of it


@pytest.mark.native
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("time", [1, 37])
def test_two_layers_are_those_of_float64(packed: bool, time: int) -> None:
    """The second layer mixes in the values of the first; float64 has definitions only."""
    torch.manual_seed(0)
    settings = {"hidden_size": 48, "head_dim": 24, "num_hidden_layers": 2}
    layers = nn.ModuleList(RWKV7Attention(**settings, layer_idx=i) for i in range(2))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = random(1 if packed else 3, time, 48)
    ends = [0, 1, time] if time > 1 else [0, 1]
    assert is_native(x)

    def run(dtype: torch.dtype) -> list[Tensor]:
        first, second = layers.to(dtype)
        given = x.to(dtype).requires_grad_()
        layout = make_layout((x.shape[0], time), cu_seqlens=torch.tensor(ends) if packed else None)
        y = second.mix(first.mix(given, layout, None), layout, None)
        gradients = torch.autograd.grad(y, [given, *layers.parameters()], random(*y.shape, seed=9).to(dtype))
        return [y.detach(), *gradients]

    for a, b in zip(run(torch.float32), run(torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5 * float(b.abs().max()))


@pytest.mark.native
def test_inputs_that_are_not_contiguous_and_threads_change_nothing() -> None:
    shape, before = (2, 200, 4, 32), torch.get_num_threads()
    k, decay, rate, k_k, k_a = key_tensors(shape)

    def run(*tensors: Tensor) -> list[Tensor]:
        return results_and_gradients(lambda *given: rule_inputs(*given, 4), tensors, torch.float32)

    try:
        torch.set_num_threads(1)
        expected = run(k, decay, rate, k_k, k_a)
        torch.set_num_threads(3)
        found = run(k.mT.contiguous().mT, torch.stack([decay, rate], -1)[..., 0], rate, k_k, k_a)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_second_derivatives_use_the_definition() -> None:
    """In float32 a second derivative must not come from gradients that were made in place."""
    x, shifted = (random(2, 3, 4, seed=i).requires_grad_() for i in range(2))
    mix = random(1, 1, 4, seed=2).requires_grad_()
    (stream,) = mixed_streams(x, shifted, mix)
    (of_shifted,) = torch.autograd.grad(stream.square().sum() / 2, shifted, create_graph=True)
    (again,) = torch.autograd.grad(of_shifted.sum(), mix)
    torch.testing.assert_close(again, (x + 2 * shifted * mix).sum((0, 1), keepdim=True))
    key = [x.double().requires_grad_() for x in key_tensors((1, 2, 2, 3))]
    assert torch.autograd.gradgradcheck(lambda *given: tuple(rule_inputs(*given, 2)), key)
    for tensors, function in (
        (key_tensors((1, 2, 2, 3)), lambda *given: rule_inputs(*given, 2)[3]),  # one of four outputs
        (output_tensors((1, 2, 2, 3)), output),
    ):
        given = [x.requires_grad_() for x in tensors]
        second = []
        for dtype in (torch.float32, torch.float64):
            inputs = [x.detach().to(dtype).requires_grad_() for x in given]
            first = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)[0]
            second.append(torch.autograd.grad(first.square().sum(), inputs[0])[0].double())
        torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)

"""The attention layer against a loop over tokens with complex-number RoPE; groups, windows, packs, positions."""

import cmath
import math

import pytest
import torch

from mdn.layers import Attention, TokenLayout
from mdn.layers.attention import causal_mask
from mdn.ops.boundaries import SequenceBoundaries

SIZE, HEADS = 16, 4


def make(**fields) -> Attention:
    torch.manual_seed(0)
    return Attention(hidden_size=SIZE, num_heads=HEADS, layer_idx=0, **fields).double()


def rotated(x, position, theta):
    """RoPE with complex numbers: coordinates i and i + d / 2 form one number, turned by position * theta^(-2i / d)."""
    half = len(x) // 2
    turned = [complex(x[i], x[i + half]) * cmath.exp(1j * position * theta ** (-2 * i / len(x))) for i in range(half)]
    return torch.tensor([z.real for z in turned] + [z.imag for z in turned], dtype=torch.float64)


def by_loops(layer: Attention, x, theta=10000.0):
    """One sequence ``[T, D]``."""
    q, k, v = ((x @ p.weight.T + (0 if p.bias is None else p.bias)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    d = SIZE // HEADS
    q, k, v = q.reshape(len(x), HEADS, d), k.reshape(len(x), -1, d), v.reshape(len(x), -1, d)
    group = HEADS // k.shape[1]
    out = torch.zeros(len(x), HEADS, d, dtype=torch.float64)
    for t in range(len(x)):
        first = 0 if layer.window_size is None else max(0, t - layer.window_size + 1)
        for h in range(HEADS):
            query = rotated(q[t, h], t, theta)
            scores = [query @ rotated(k[s, h // group], s, theta) / math.sqrt(d) for s in range(first, t + 1)]
            out[t, h] = torch.softmax(torch.stack(scores), 0) @ v[first : t + 1, h // group]
    return out.reshape(len(x), -1) @ layer.o_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "qkv_bias": True},
        {"window_size": 3},
        {"window_size": 1},
        {"rope_theta": 100.0},
    ],
)
def test_it_is_causal_softmax_attention_with_rotated_queries_and_keys(fields):
    layer = make(**fields)
    x = torch.randn(2, 9, SIZE, dtype=torch.float64)
    expected = torch.stack([by_loops(layer, row, fields.get("rope_theta", 10000.0)) for row in x])
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)  # angles are float32


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2}, {"window_size": 3}])
def test_packed_sequences_equal_separate_ones(fields):
    layer = make(**fields)
    lengths = (4, 1, 0, 9)
    x = torch.randn(1, 14, SIZE, dtype=torch.float64)
    found = layer(x, TokenLayout((1, 14), SequenceBoundaries.from_lengths(lengths)))
    apart = [layer(piece) for piece in x.split(lengths, dim=1) if piece.shape[1]]
    torch.testing.assert_close(found, torch.cat(apart, dim=1))


@torch.no_grad()
def test_given_positions_decide_the_rotation():
    layer = make()
    x = torch.randn(1, 6, SIZE, dtype=torch.float64)
    shifted = TokenLayout((1, 6), positions=torch.arange(100, 106)[None])
    stretched = TokenLayout((1, 6), positions=2 * torch.arange(6)[None])
    torch.testing.assert_close(layer(x, shifted), layer(x), rtol=1e-4, atol=1e-5)  # only differences matter
    assert (layer(x, stretched) - layer(x)).abs().max() > 1e-3


def test_the_causal_mask_ends_at_the_last_key_and_starts_at_the_window():
    assert causal_mask(2, 4, None, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(2, 4, 2, torch.device("cpu")).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"window_size": 0}, "window_size"),
        ({"hidden_size": 18}, "hidden_size"),
        ({"hidden_size": 12}, "even head dimension"),
        ({"rope_theta": None}, "rope_theta must be a positive number, got None"),
        ({"rope_theta": 0.0}, "rope_theta must be a positive number, got 0.0"),
    ],
)
def test_bad_arguments_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        Attention(**{"hidden_size": SIZE, "num_heads": HEADS, **fields})

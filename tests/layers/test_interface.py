"""Every mixer as a layer in somebody's own model: masks, packs, caches, named errors, hooks."""

import inspect

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import mdn.models  # noqa: F401  (registers the cache layer)
from mdn.layers import MIXERS, Mixer, MomentumDeltaNet, ProjectedMixer, TokenLayout
from mdn.ops.boundaries import SequenceBoundaries
from small_models import small_config

WIDTH = 32


def make(name: str, **fields) -> Mixer:
    """Layer 0 of a small model, in float64, with every parameter random."""
    torch.manual_seed(0)
    layer = MIXERS[name].from_config(small_config(name, **fields), 0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3)
    return layer


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_each_row_of_a_masked_batch_equals_that_row_alone(name):
    layer, x = make(name), states(3, 12)
    mask = torch.ones(3, 12)
    mask[0, :5], mask[1, 9:], mask[2, 4:7] = 0, 0, 0
    y = layer(x, attention_mask=mask)
    for row in range(3):
        kept = mask[row].bool()
        torch.testing.assert_close(y[row, kept], layer(x[row : row + 1, kept])[0])
    assert y[mask == 0].abs().max() == 0


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_packed_sequences_equal_separate_ones(name):
    layer, x, lengths = make(name), states(1, 12), [5, 1, 6]
    cu_seqlens = torch.tensor([0, 5, 6, 12])
    expected = torch.cat([layer(piece) for piece in x.split(lengths, dim=1)], dim=1)
    for given in (cu_seqlens, cu_seqlens.int(), SequenceBoundaries.from_lengths(lengths)):
        torch.testing.assert_close(layer(x, cu_seqlens=given), expected)


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_boundaries_on_another_device_are_moved_to_that_of_the_tokens(name):
    layer, x = make(name).to("meta"), states(1, 12).to("meta")
    for given in (torch.tensor([0, 5, 6, 12]), SequenceBoundaries.from_lengths([5, 1, 6])):
        assert layer(x, cu_seqlens=given).shape == x.shape


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_layer_alone_continues_from_a_cache_with_and_without_a_mask(name):
    layer, x = make(name), states(2, 12)
    mask = torch.ones(2, 12)
    mask[0, :4] = 0
    for given in (None, mask):
        cache, found, seen = DynamicCache(config=small_config(name)), [], 0
        for piece in x.split([6, 1, 1, 3, 1], dim=1):
            seen += piece.shape[1]
            part = None if given is None else given[:, :seen]
            found.append(layer(piece, past_key_values=cache, attention_mask=part))
        assert cache.get_seq_length() == 12
        torch.testing.assert_close(torch.cat(found, dim=1), layer(x, attention_mask=given))


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_hidden_states_of_another_shape_are_refused_by_name(name):
    layer = make(name)
    for shape in ((12, WIDTH), (2, 12, WIDTH + 1), (1, 2, 12, WIDTH)):
        with pytest.raises(ValueError, match=rf"hidden_states must have shape \[B, T, {WIDTH}\], got \[{shape[0]}, "):
            layer(torch.zeros(shape, dtype=torch.float64))


def test_contradictory_arguments_are_refused_by_name():
    layer, x = make("momentum_deltanet"), states(1, 4)
    with pytest.raises(TypeError, match="layout must be a TokenLayout, got Tensor; give a mask as attention_mask="):
        layer(x, torch.ones(1, 4))
    with pytest.raises(ValueError, match="layout already says where the tokens are"):
        layer(x, TokenLayout((1, 4)), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="a pack has no padding"):
        layer(x, cu_seqlens=torch.tensor([0, 4]), attention_mask=torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="cover the 0 cached and 4 new columns, got 5"):
        layer(x, attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="cu_seqlens cannot be combined with past_key_values"):
        layer(x, past_key_values=DynamicCache(config=small_config()), cu_seqlens=torch.tensor([0, 4]))


def test_a_hook_on_the_rule_sees_keys_gates_and_states():
    layer, x, seen = make("momentum_deltanet"), states(2, 9), []
    layer.rule.register_forward_hook(lambda *call: seen.append(call[2:]), with_kwargs=True)
    cache = DynamicCache(config=small_config())
    layer(x[:, :5], past_key_values=cache)
    layer(x[:, 5:], past_key_values=cache)
    (first, output), (second, _) = seen
    assert first["k"].shape == (2, 5, layer.num_heads, layer.head_k_dim)
    for watched, asked in zip(second["gates"], layer.gates(x[:, 5:])):
        torch.testing.assert_close(watched, asked)
    assert first["initial_state"] is None
    torch.testing.assert_close(second["initial_state"][1], output.final_state[1])
    assert output.o.shape == (2, 5, layer.num_v_heads, layer.head_v_dim)


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_at_most_two_classes_stand_above_a_mixer(name):
    above = [kind for kind in MIXERS[name].__mro__[1:] if kind not in (nn.Module, object)]
    assert above in ([Mixer], [ProjectedMixer, Mixer])


def test_a_mixer_reads_the_fields_of_the_config_that_its_constructor_names():
    class Own(Mixer):
        own_defaults = ("conv_size",)
        config_names = {"eps": "norm_eps"}  # noqa: RUF012

        def __init__(self, hidden_size, eps=1.0, conv_size=7, temperature=2.0, layer_idx=None):
            super().__init__(hidden_size, layer_idx)
            self.eps, self.conv_size, self.temperature = eps, conv_size, temperature

    config = small_config(norm_eps=0.25, conv_size=5)
    config.mixer_options = {"temperature": 3.0}
    made = Own.from_config(config, 1)
    assert (made.hidden_size, made.layer_idx) == (WIDTH, 1)
    assert (made.eps, made.conv_size, made.temperature) == (0.25, 7, 3.0)


def test_the_layers_arguments_are_those_of_the_contract():
    names = list(inspect.signature(MomentumDeltaNet).parameters)
    promised = ["hidden_size", "head_dim", "num_heads", "num_v_heads", "expand_v", "use_gate", "use_short_conv"]
    promised += ["conv_size", "use_output_correction", "use_momentum", "min_log_mu", "tau_factor", "bound_alpha"]
    promised += ["bound_beta", "eta_activation", "norm_eps", "layer_idx"]
    assert set(promised) <= set(names)


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(set(MIXERS) - {"attention"}))
def test_the_gates_of_a_layer_cannot_leave_their_range_and_are_not_looked_at(name, monkeypatch):
    def looked_at(*arguments):
        raise AssertionError("the values of the gates were read")

    for module in ("first_order.inputs", "momentum.checks", "momentum.custom_op"):
        monkeypatch.setattr(f"mdn.ops.{module}.check_gate_values", looked_at)
    layer, x, cache = make(name), states(2, 12), DynamicCache(config=small_config(name))
    for piece in x.split([8, 1, 3], dim=1):
        layer(piece, past_key_values=cache)

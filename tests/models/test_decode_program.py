"""Replayed decode steps: equal to the layers' own, and given up as soon as something they were made from changes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from torch.utils._python_dispatch import _disable_current_modes
from transformers import DynamicCache

from definition import relative_error
from mdn.layers import MIXERS
from mdn.models import decode_program
from mdn.models.decode_program import DecodeProgram
from mdn.ops.backends import backend_module, registered_backend
from small_models import small_model, tokens

pytestmark = pytest.mark.native


def steps(model, cache, ids):
    """Logits of decode steps over ids [B, T]."""
    return torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])], dim=1)


def started(name="momentum_deltanet", batch=2, weights="int8", **fields):
    """A model and a cache after a prompt."""
    model = small_model(name, **fields).eval()
    if weights != "float32":
        model.quantize(weights)
    cache = DynamicCache(config=model.config)
    model(tokens(batch, 5), past_key_values=cache)
    return model, cache


@torch.no_grad()
@pytest.mark.parametrize(("batch", "weights"), [(1, "int8"), (3, "int8"), (2, "float32")])
@pytest.mark.parametrize("name", [*sorted(set(MIXERS) - {"attention"}), "grouped value heads", "no convolution"])
def test_replayed_steps_equal_those_of_the_layers(name, batch, weights, monkeypatch):
    model, cache = started(name, batch, weights)
    expected_cache, ids = copy.deepcopy(cache), tokens(batch, 7, seed=3)
    found = steps(model, cache, ids)
    assert isinstance(decode_program._programs[cache], DecodeProgram)
    monkeypatch.setattr("mdn.models.modeling.can_record", lambda x, cache: False)
    assert relative_error(found, steps(model, expected_cache, ids)) < 2e-6
    for mine, theirs in zip(cache.layers, expected_cache.layers):
        for number, state in theirs.recurrent_states.items():
            if state is not None:
                assert relative_error(mine.recurrent_states[number], state) < 1e-5


@pytest.mark.parametrize("name", sorted(set(MIXERS) - {"attention"}))
def test_a_step_that_is_recorded_in_inference_mode_is_the_same_in_every_mode(name):
    ids, found = tokens(2, 12), []
    with torch.no_grad():
        model, cache = started(name, weights="float32")
        whole = model(torch.cat([tokens(2, 5), ids], dim=1)).logits[:, 5:]
    for mode, piece in zip((torch.inference_mode, torch.no_grad, torch.inference_mode), ids.split(4, dim=1)):
        with mode():
            found.append(steps(model, cache, piece).clone())
    assert isinstance(decode_program._programs[cache], DecodeProgram)
    assert relative_error(torch.cat(found, dim=1), whole) < 1e-5


@torch.no_grad()
def test_a_model_that_was_made_in_inference_mode_is_not_recorded():
    with torch.inference_mode():
        model, cache = started("mamba2", weights="float32")
    ids = tokens(2, 4)
    whole = model(torch.cat([tokens(2, 5), ids], dim=1)).logits[:, 5:]
    assert relative_error(steps(model, cache, ids), whole) < 1e-5
    assert decode_program._programs[cache] is None


@torch.no_grad()
def test_steps_with_adapters_see_the_switches_of_peft():
    peft = pytest.importorskip("peft")
    model = small_model()
    settings = peft.LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    adapted, ids = peft.get_peft_model(model, settings).eval(), tokens(2, 12)
    cache = adapted(ids[:, :5], use_cache=True).past_key_values
    steps(adapted, cache, ids[:, 5:8])
    other = copy.deepcopy(cache)
    with adapted.disable_adapter():
        found = adapted(ids[:, 8:9], past_key_values=cache).logits
        expected = adapted(ids[:, 8:9], past_key_values=other).logits  # the first step of a cache is not replayed
    assert relative_error(found, expected) < 1e-5
    assert decode_program._programs[cache] is None


@torch.no_grad()
def test_weights_that_are_elsewhere_between_calls_are_not_kept_by_a_recording():
    model, cache = started(weights="float32")
    steps(cpu_offload(model, execution_device="cpu"), cache, tokens(2, 3))
    assert decode_program._programs[cache] is None


@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "float32"])
def test_mdn_steps_are_one_native_call(weights):
    model, cache = started(weights=weights, intermediate_size=64)  # a multiple of 32: nothing has to be padded
    steps(model, cache, tokens(2, 3))
    assert len(decode_program._programs[cache].recorded.parts) == 1


@torch.no_grad()
def test_a_prompt_in_between_and_the_cache_of_another_batch_are_no_problem():
    model, cache = started()
    ids = tokens(2, 20, seed=4)
    found = [steps(model, cache, ids[:, :4]), model(ids[:, 4:10], past_key_values=cache).logits]
    found.append(steps(model, cache, ids[:, 10:14]))
    assert isinstance(decode_program._programs[cache], DecodeProgram)
    whole = model(torch.cat([tokens(2, 5), ids[:, :14]], dim=1)).logits[:, 5:]
    assert relative_error(torch.cat(found, dim=1), whole) < 1e-5


def hook(model, cache):
    seen = []
    model.model.layers[0].attn.gate_map.register_forward_hook(lambda *arguments: seen.append(1))
    return lambda: len(seen) == 3


def other_weights(model, cache):
    model.model.layers[1].mlp.down_proj.packed = torch.zeros_like(model.model.layers[1].mlp.down_proj.packed)


def other_module(model, cache):
    model.model.layers[0].attn_norm = copy.deepcopy(model.model.layers[1].attn_norm)


def moved_states(model, cache):
    cache.reorder_cache(torch.tensor([1, 0]))


def threads(model, cache):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return lambda: torch.set_num_threads(torch.get_num_threads() - 1) is None


@torch.no_grad()
@pytest.mark.parametrize("change", [hook, other_weights, other_module, moved_states, threads])
def test_whatever_changes_ends_the_replay(change, monkeypatch):
    model, cache = started()
    steps(model, cache, tokens(2, 3))
    is_seen = change(model, cache)
    expected_model, expected_cache, ids = copy.deepcopy(model), copy.deepcopy(cache), tokens(2, 3, seed=6)
    found = steps(model, cache, ids)
    assert decode_program._programs[cache] is None
    assert is_seen is None or is_seen()
    monkeypatch.setattr("mdn.models.modeling.can_record", lambda x, cache: False)
    assert relative_error(found, steps(expected_model, expected_cache, ids)) < 2e-6


@torch.no_grad()
def test_a_backend_that_the_environment_names_later_is_used_or_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, cache = started()
    steps(model, cache, tokens(2, 3))
    monkeypatch.setenv("MDN_BACKEND", "triton")
    with pytest.raises(ValueError, match="MDN_BACKEND='triton' cannot be used here"):
        steps(model, cache, tokens(2, 1))


@torch.no_grad()
def test_steps_of_a_backend_whose_kernel_torch_does_not_see_are_replayed_as_well(monkeypatch):
    trusted = backend_module("torch")

    def step_(*arguments):
        with _disable_current_modes():
            return trusted.step_(*arguments)

    foreign = SimpleNamespace(forward=trusted.forward, backward=trusted.backward, step_=step_)
    monkeypatch.setenv("MDN_BACKEND", "foreign")
    with registered_backend("foreign", foreign):
        model, cache = started(weights="float32")
        expected_cache, ids = copy.deepcopy(cache), tokens(2, 6, seed=8)
        found = steps(model, cache, ids)
        assert isinstance(decode_program._programs[cache], DecodeProgram)
        monkeypatch.setattr("mdn.models.modeling.can_record", lambda x, cache: False)
        assert relative_error(found, steps(model, expected_cache, ids)) < 2e-6


@torch.no_grad()
def test_weights_that_are_written_in_place_are_seen():
    model, cache = started()
    steps(model, cache, tokens(2, 3))
    other = copy.deepcopy(cache)
    model.model.norm.weight.mul_(2)
    found = steps(model, cache, tokens(2, 1, seed=7))
    assert isinstance(decode_program._programs[cache], DecodeProgram)
    assert relative_error(found, steps(model, other, tokens(2, 1, seed=7))) < 2e-6


def test_with_gradients_or_hidden_states_the_layers_run_themselves():
    model, cache = started()
    output = model(tokens(2, 1), past_key_values=cache, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert output.logits.requires_grad
    assert cache not in decode_program._programs

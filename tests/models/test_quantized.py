"""Models with packed weights: equal to the model with the dequantised weights, saved, loaded, refused when broken."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from definition import relative_error
from mdn.common.loading import load_model
from mdn.layers.linear import Packed, PackedLinear
from mdn.models import MomentumDeltaNetForCausalLM
from mdn.models.info import model_facts
from mdn.ops.cpu.linear import FORMATS
from small_models import MODELS, small_config, small_model, tokens


def dequantised(packed: MomentumDeltaNetForCausalLM, original: MomentumDeltaNetForCausalLM):
    """The float32 model that ``packed`` computes with."""
    model = copy.deepcopy(original)
    for name, module in packed.named_modules():
        if isinstance(module, Packed):
            model.get_submodule(name).weight.data.copy_(module.weight)
    return model


def generate(model, ids, **arguments):
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **arguments}
    return model.generate(ids, max_new_tokens=6, **arguments)


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_generation_equals_that_of_the_dequantised_float32_model(name, format):
    original = small_model(name)
    packed = copy.deepcopy(original).quantize(format)
    expected = dequantised(packed, original)
    ids = tokens(3, 9)
    assert generate(packed, ids).equal(generate(expected, ids))
    assert relative_error(packed(ids).logits, expected(ids).logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
def test_padding_beams_and_a_prompt_in_pieces_work_as_before(format):
    original = small_model("hybrid")
    packed = copy.deepcopy(original).quantize(format)
    expected = dequantised(packed, original)
    ids, mask = tokens(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[0, :8], mask[2, :3] = 0, 0
    for arguments in ({"attention_mask": mask}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        assert generate(packed, ids, **arguments).equal(generate(expected, ids, **arguments))


@pytest.mark.parametrize("fields", [{}, {"loss_chunk_size": 4}])
def test_the_loss_and_gradients_of_other_parameters_are_those_of_the_dequantised_model(fields):
    original = small_model(**fields)
    packed = copy.deepcopy(original).quantize("int8")
    expected, ids = dequantised(packed, original), tokens(2, 30)
    losses = [model(ids, labels=ids).loss for model in (packed, expected)]
    assert relative_error(*losses) < 1e-6
    for loss in losses:
        loss.backward()
    assert relative_error(packed.model.norm.weight.grad, expected.model.norm.weight.grad) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_saving_and_loading_keep_the_bits(format, tied, tmp_path):
    packed = small_model(tie_word_embeddings=tied, conv_bias=True, use_lora_gate=True).quantize(format)
    packed.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    assert json.loads((tmp_path / "config.json").read_text())["weight_format"] == format
    for dtype in ("auto", torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for name, module in packed.named_modules():
            if isinstance(module, Packed):
                assert loaded.get_submodule(name).weight.equal(module.weight)
        if dtype == "auto":
            assert loaded(ids).logits.equal(packed(ids).logits)
        if tied:
            assert loaded.lm_head.packed.data_ptr() == loaded.model.embeddings.packed.data_ptr()


@torch.no_grad()
def test_bf16_weights_of_a_bfloat16_checkpoint_are_exact():
    original = small_model().bfloat16()
    packed = copy.deepcopy(original).quantize("bf16")
    for name, module in packed.named_modules():
        if isinstance(module, Packed):
            assert module.weight.equal(original.get_submodule(name).weight.float())


@pytest.mark.native
@torch.no_grad()
def test_projections_of_one_input_are_one_product_and_copies_have_their_own():
    model = small_model().quantize("int8")
    mixer, ids = model.model.layers[0].attn, tokens(1, 1)
    shared = mixer.q_proj.shared
    assert [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj] == shared.members[:4]
    assert {mixer.a_proj, mixer.b_proj, mixer.m_proj, mixer.e_proj} <= set(shared.members)
    calls = []
    expected = model(ids).logits
    assert shared.waiting is None  # everybody has taken its part
    twin, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    together = shared.products[tuple(shared.members)]
    shared.products[tuple(shared.members)] = _Recording(together, calls)
    assert model(ids).logits.equal(expected)
    assert calls == [1]
    for other in (twin, unpickled):
        assert other(ids).logits.equal(expected)
        assert other.model.layers[0].attn.q_proj.packed.data_ptr() != mixer.q_proj.packed.data_ptr()


class _Recording:
    """Counts the calls of a product."""

    def __init__(self, product, calls):
        self.product, self.calls = product, calls

    def __call__(self, rows):
        self.calls.append(len(rows))
        return self.product(rows)

    def __getattr__(self, name):
        return getattr(self.product, name)


@torch.no_grad()
def test_a_vector_that_was_written_to_is_multiplied_again():
    model = small_model().quantize("int8")
    mixer = model.model.layers[0].attn
    x = torch.randn(1, 32)
    mixer.q_proj(x)
    x.mul_(2)
    assert torch.allclose(mixer.k_proj(x), x @ mixer.k_proj.weight.T, atol=1e-5)
    with torch.inference_mode():
        y = torch.randn(1, 32)
        mixer.q_proj(y)
        y.mul_(2)
        assert torch.allclose(mixer.k_proj(y), y @ mixer.k_proj.weight.T, atol=1e-5)


def test_threads_that_decode_at_once_do_not_disturb_one_another():
    model = small_model().quantize("int8")
    prompts = [tokens(1, 5, seed=seed) for seed in range(4)]
    expected = [generate(model, ids) for ids in prompts]
    found: dict[int, list] = {}

    def work(number):
        found[number] = [generate(model, prompts[number]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids.equal(expected[number]) for number, rounds in found.items() for ids in rounds)


def test_a_packed_model_is_smaller_and_the_facts_about_it_are_those_of_the_original():
    original = small_model(hidden_size=64)
    sizes = [copy.deepcopy(original).quantize(format).get_memory_footprint() for format in FORMATS]
    assert original.get_memory_footprint() > sizes[0] > sizes[1] > sizes[2]
    packed = copy.deepcopy(original).quantize("int4")
    assert model_facts(packed.config) == model_facts(original.config)


def test_what_cannot_be_quantised_or_loaded_is_refused_in_one_line(tmp_path):
    model = small_model()
    with pytest.raises(ValueError, match="weight_format must be one of bf16, int8, int4, got 'int3'"):
        model.quantize("int3")
    with pytest.raises(ValueError, match="weight_format must be one of bf16, int8, int4, got 'fp8'"):
        small_config(weight_format="fp8")
    with pytest.raises(ValueError, match="the weights are int8 already: quantise the original model"):
        model.quantize("int8").quantize("int4")
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    given = json.loads(config.read_text())

    def message() -> str:
        with pytest.raises(ValueError, match="cannot load") as caught:
            load_model(tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for wrong in ("int4", "bf16", None):
        config.write_text(json.dumps(given | {"weight_format": wrong}))
        assert "missing or do not fit the config" in message()
    config.write_text(json.dumps(given | {"weight_format": "int5"}))
    assert "weight_format must be one of" in message()
    config.write_text(json.dumps(given))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message()


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_outside_the_vocabulary_are_refused_by_name(format):
    model = small_model().quantize(format)
    assert model.get_input_embeddings().num_embeddings == 61
    for token in (61, 63, 200, -1, -5):
        with pytest.raises(IndexError, match=rf"input_ids must lie in 0..60 .*, got {min(token, 3)}..{max(token, 3)}"):
            model(torch.tensor([[3, token]]))


def test_damaged_scales_are_refused(tmp_path):
    model = small_model().quantize("int8")
    model.lm_head.scales.view(torch.float32)[0, 3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the weights lm_head\.weight hold NaN or infinity"):
        load_model(tmp_path)


def test_without_the_kernel_the_dequantised_weights_are_used(monkeypatch):
    layer = PackedLinear(20, 40, "int4", bias=True)
    layer.fill(torch.randn(20, 40))
    x = torch.randn(3, 40)
    with torch.no_grad():
        expected = layer(x)
        monkeypatch.setattr("mdn.layers.linear.why_unavailable", lambda: "not built")
        assert torch.allclose(layer(x), expected, atol=1e-5)

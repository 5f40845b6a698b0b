"""What a transformers user takes for granted of any model: outputs, saving, resizing, generation, caches, training.

For MDN, a hybrid, Gated DeltaNet and RWKV-7 with its own blocks. transformers checks the same of its own models.
"""

import copy
import inspect
import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationConfig

from definition import relative_error
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM, MomentumDeltaNetModel
from small_models import VOCABULARY, small_config, tokens

KINDS = {
    "momentum_deltanet": {},
    "hybrid": {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2}},
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "rwkv7": {"mixer": "rwkv7", "mlp": "rwkv7", "norm": "layernorm", "norm_embeddings": True},
}
LAYERS, WIDTH = 2, 32


def config_of(kind: str, **fields) -> MomentumDeltaNetConfig:
    return small_config(**{**KINDS[kind], "pad_token_id": 0, **fields})


def model_of(kind: str, **fields) -> MomentumDeltaNetForCausalLM:
    """Every parameter random: RWKV-7's blocks begin as the identity."""
    torch.manual_seed(0)
    model = MomentumDeltaNetForCausalLM(config_of(kind, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


every_kind = pytest.mark.parametrize("kind", KINDS)

# -------------------------------------------------------------------------------------------------------------- outputs


@every_kind
@torch.no_grad()
def test_hidden_states_are_the_embedding_every_block_and_the_last_norm(kind):
    model, ids = model_of(kind), tokens(2, 7)
    outputs = model(ids, output_hidden_states=True)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, 7, WIDTH)] * (LAYERS + 1)
    assert torch.equal(outputs.hidden_states[0], model.model.embeddings(ids))
    assert torch.equal(model.lm_head(outputs.hidden_states[-1]), outputs.logits)


@every_kind
@pytest.mark.parametrize("padded", [False, True])
def test_every_returned_hidden_state_receives_a_gradient(kind, padded):
    model, ids = model_of(kind), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, : 3 if padded else 0] = 0
    outputs = model(ids, attention_mask=mask, output_hidden_states=True)
    for state in outputs.hidden_states:
        state.retain_grad()
    outputs.logits[1].square().sum().backward()
    assert all(state.grad is not None and state.grad[1].abs().max() > 0 for state in outputs.hidden_states)


@torch.no_grad()
@every_kind
def test_tuples_hold_what_the_named_output_holds(kind):
    model, ids = model_of(kind), tokens(2, 7)
    arguments = {"labels": ids, "output_hidden_states": True, "use_cache": False}
    named, plain = model(ids, **arguments), model(ids, **arguments, return_dict=False)
    assert torch.equal(plain[0], named.loss)
    assert torch.equal(plain[1], named.logits)
    for one, other in zip(plain[2], named.hidden_states, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
@every_kind
def test_embeddings_as_inputs_and_a_second_call_give_the_same_logits(kind):
    model, ids = model_of(kind), tokens(2, 7)
    expected = model(ids).logits
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)
    assert torch.equal(model(ids, logits_to_keep=2).logits, expected[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 3])).logits, expected[:, [1, 3]])
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"


@torch.no_grad()
@every_kind
def test_left_padding_changes_no_logit(kind):
    model, ids = model_of(kind), tokens(2, 6)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 5), torch.ones(2, 6)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0).long()
    expected = model(ids).logits
    assert relative_error(model(padded, attention_mask=mask).logits[:, 5:], expected) < 1e-5
    found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
    assert relative_error(found, expected) < 1e-5


# -------------------------------------------------------------------------------------------------------- configuration


def test_a_config_survives_json_dictionaries_and_files(tmp_path):
    for kind in KINDS:
        config = config_of(kind)
        config.save_pretrained(tmp_path / kind)
        again = [
            MomentumDeltaNetConfig.from_dict(config.to_dict()),
            MomentumDeltaNetConfig(**json.loads(config.to_json_string(use_diff=False))),
            MomentumDeltaNetConfig.from_pretrained(tmp_path / kind),
            AutoConfig.from_pretrained(tmp_path / kind),
            copy.deepcopy(config),
        ]
        ignored = {"_name_or_path", "auto_map", "transformers_version"}
        fields = {key: value for key, value in config.to_dict().items() if key not in ignored}
        for other in again:
            assert {key: value for key, value in other.to_dict().items() if key not in ignored} == fields


def test_names_that_tools_read_exist_can_be_given_and_can_be_set():
    config = MomentumDeltaNetConfig(num_attention_heads=3, num_key_value_heads=1, rms_norm_eps=1e-3, num_labels=7)
    assert (config.num_heads, config.num_kv_heads, config.norm_eps, config.num_labels) == (3, 1, 1e-3, 7)
    assert "num_attention_heads" not in config.to_dict()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        setattr(config, name, 5)
        assert getattr(config, name) == 5
    assert config.get_text_config() is config
    assert len(config.layer_types) == config.num_hidden_layers
    assert MomentumDeltaNetConfig(output_hidden_states=True, return_dict=False).output_hidden_states is True


@every_kind
def test_parameters_that_stay_float32_exist_under_their_names(kind, tmp_path):
    model = model_of(kind)
    own = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert model._keep_in_fp32_modules_strict <= own
    assert {name.rpartition(".")[2] for name in model.no_weight_decay_names()} == model._keep_in_fp32_modules_strict
    assert {type(module).__name__ for module in model.modules()} >= set(model._no_split_modules)


# ------------------------------------------------------------------------------------------------------ saving, loading


@every_kind
def test_a_model_in_shards_loads_in_any_dtype_and_as_base_model(kind, tmp_path):
    model, ids = model_of(kind), tokens(1, 5)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert relative_error(half(ids).logits.float(), model(ids).logits) < 0.15
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, MomentumDeltaNetModel)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_a_base_model_becomes_a_language_model_with_a_new_head_only(tmp_path):
    base = model_of("hybrid").model
    base.save_pretrained(tmp_path)
    model, report = MomentumDeltaNetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}
    assert torch.equal(model.model(tokens(1, 4)).last_hidden_state, base.eval()(tokens(1, 4)).last_hidden_state)


@every_kind
@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_grows_and_shrinks_and_the_rest_stays(kind, tied, tmp_path):
    model, ids = model_of(kind, tie_word_embeddings=tied), tokens(1, 5) % 40
    expected = model(ids).logits
    for size in (VOCABULARY + 9, 40):
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
        logits = model(ids, labels=ids).logits
        assert logits.shape[-1] == size
        torch.testing.assert_close(logits[..., :40], expected[..., :40])
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) is tied


@every_kind
def test_embeddings_can_be_replaced(kind):
    model = model_of(kind)
    other = torch.nn.Embedding(VOCABULARY, WIDTH)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is model.model.embeddings is other


# ------------------------------------------------------------------------------------------------------------- training


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_training_with_gradient_checkpointing_gives_the_same_gradients_to_every_parameter(kind, reentrant):
    ids, gradients = tokens(2, 9), []
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    if kind == "rwkv7" and reentrant:  # the values that its layers share would have no gradients
        with pytest.raises(ValueError, match="use_reentrant=True loses gradients"):
            model_of(kind).gradient_checkpointing_enable({"use_reentrant": True})
        return
    for checkpointing in (False, True):
        model = model_of(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()  # what the reentrant form needs
            assert model.is_gradient_checkpointing
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in gradients[0].items():
        assert grad is not None
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], grad)


@every_kind
def test_a_few_steps_of_training_lower_the_loss(kind):
    torch.manual_seed(0)
    model, ids = MomentumDeltaNetForCausalLM(config_of(kind)).train(), tokens(2, 12)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# ----------------------------------------------------------------------------------------------------------- generation


def generate(model, ids, **arguments):
    arguments = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids), **arguments}
    return model.generate(ids, **arguments)


@every_kind
def test_greedy_generation_returns_scores_logits_and_states_that_belong_together(kind):
    model, ids = model_of(kind), tokens(2, 6)
    options = ("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate")
    generated = generate(model, ids, **dict.fromkeys(options, True))
    assert generated.sequences.shape == (2, 11)
    assert torch.equal(generate(model, ids), generated.sequences)
    assert torch.equal(generate(model, ids, use_cache=False), generated.sequences)
    logits = model(generated.sequences[:, :-1]).logits[:, 5:]
    assert relative_error(torch.stack(generated.logits, 1), logits) < 1e-5
    assert torch.equal(torch.stack(generated.scores, 1).argmax(-1), generated.sequences[:, 6:])
    assert [len(states) for states in generated.hidden_states] == [LAYERS + 1] * 5
    assert generated.hidden_states[0][0].shape == (2, 6, WIDTH)
    assert generated.hidden_states[1][0].shape == (2, 1, WIDTH)


@every_kind
def test_the_cache_that_generation_returns_has_a_layer_for_every_block(kind):
    model, ids = model_of(kind), tokens(2, 6)
    cache = generate(model, ids, return_dict_in_generate=True).past_key_values
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == 10  # the last token was not fed back
    assert len(cache.layers) == LAYERS
    for block, layer in zip(model.model.layers, cache.layers):
        if block.attn.cache_type == "full_attention":
            assert layer.keys.shape == layer.values.shape == (2, 2, 10, 8)
        else:
            shapes = [tuple(x.shape) for x in layer.recurrent_states.values() if x is not None]
            expected = [(2, *s.shape) for name, s in block.attn.state_shapes().items() if name != "conv"]
            assert shapes == expected


@every_kind
def test_sampling_repeats_with_the_seed_and_returns_several_sequences(kind):
    model, ids = model_of(kind), tokens(2, 6)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(generate(model, ids, do_sample=True, num_return_sequences=3, top_k=20, temperature=0.9))
    assert found[0].shape == (6, 11)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[0][:, :6], ids.repeat_interleave(3, 0))


@every_kind
def test_beams_find_the_same_with_and_without_a_cache_and_their_scores_are_the_models(kind):
    model, ids = model_of(kind), tokens(2, 6)
    arguments = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.0}
    found = generate(model, ids, **arguments, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(generate(model, ids, **arguments, use_cache=False), found.sequences)
    logits = model(found.sequences[:, :-1]).logits[:, 5:].log_softmax(-1)
    expected = logits.gather(-1, found.sequences[:, 6:, None]).sum((1, 2))
    torch.testing.assert_close(found.sequences_scores, expected, rtol=1e-4, atol=1e-4)
    transitions = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(transitions.sum(1), expected, rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    assert generate(model, ids, num_beams=2, do_sample=True).shape == (2, 11)


@every_kind
def test_generation_goes_on_from_the_cache_of_an_earlier_one(kind):
    model, ids = model_of(kind), tokens(1, 6)
    whole = generate(model, ids, max_new_tokens=8)
    first = generate(model, ids, max_new_tokens=3, return_dict_in_generate=True)
    rest = generate(model, first.sequences, past_key_values=first.past_key_values, max_new_tokens=5)
    assert torch.equal(rest, whole)


@every_kind
def test_rows_of_a_left_padded_batch_generate_as_if_alone(kind):
    model, ids = model_of(kind), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = generate(model, ids, attention_mask=mask)
    assert torch.equal(found[:1, 4:], generate(model, ids[:1, 4:]))
    assert torch.equal(found[1:], generate(model, ids[1:]))
    beams = generate(model, ids, attention_mask=mask, num_beams=3)
    assert torch.equal(beams[:1, 4:], generate(model, ids[:1, 4:], num_beams=3))


@every_kind
def test_embeddings_are_a_prompt_too(kind):
    model, ids = model_of(kind), tokens(2, 6)
    embeddings = model.get_input_embeddings()(ids)
    mask = torch.ones_like(ids)
    found = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, generate(model, ids)[:, 6:])


@every_kind
def test_generation_starts_from_the_start_token_alone(kind):
    model = model_of(kind, bos_token_id=3)
    found = model.generate(max_new_tokens=4, do_sample=False)
    assert torch.equal(found, generate(model, torch.tensor([[3]]), max_new_tokens=4))


@every_kind
def test_what_would_take_tokens_back_is_refused(kind):
    model, ids = model_of(kind), tokens(1, 6)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        generate(model, ids, assistant_model=model)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        generate(model, ids, prompt_lookup_num_tokens=2)


@every_kind
def test_a_static_cache_gives_the_same_or_is_refused_where_there_is_attention(kind):
    model, ids = model_of(kind), tokens(2, 6)
    if kind == "hybrid":
        with pytest.raises(ValueError, match=r"need a DynamicCache\(config=model\.config\), not a StaticCache"):
            generate(model, ids, cache_implementation="static")
    else:
        assert torch.equal(generate(model, ids, cache_implementation="static"), generate(model, ids))


def test_the_generation_config_is_saved_and_honoured(tmp_path):
    model, ids = model_of("hybrid"), tokens(1, 6)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generate(ids, attention_mask=torch.ones_like(ids)).shape == (1, 9)

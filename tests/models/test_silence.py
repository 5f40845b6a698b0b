"""Nothing is silently ignored: misspelt arguments, labels that do not fit, caches of another batch, config flags."""

import copy
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from definition import relative_error
from mdn.experiments.mqar import load_mqar_recipe
from mdn.experiments.studies.catalogue import STUDIES
from mdn.experiments.studies.contestants import CONTESTANTS, contestant
from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetConfig
from mdn.models.info import load_config, shipped_configs
from mdn.training.build import model_config
from mdn.training.recipe import load_recipe, packaged_recipes
from small_models import MODELS, small_config, small_model, tokens

# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("misspelt", ["cu_seqlen", "attn_mask", "lables", "num_items"])
def test_a_misspelt_argument_is_refused_by_name(misspelt):
    model = small_model()
    for module in (model, model.model):
        with pytest.raises(TypeError, match=rf"forward\(\) got unknown arguments: {misspelt}"):
            module(tokens(1, 4), **{misspelt: torch.tensor([0, 2, 4])})


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("shape", [(3, 5), (1, 24), (3, 25), (72,)])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_another_shape_are_refused_however_the_loss_is_computed(name, shape, chunk):
    model = small_model(loss_chunk_size=chunk)
    with pytest.raises(ValueError, match=rf"^{name} must have the tokens' shape \[3, 24\], got"):
        model(tokens(3, 24), **{name: torch.zeros(shape, dtype=torch.long)})


@pytest.mark.parametrize("chunk", [None, 5])
def test_shifted_labels_alone_give_the_loss(chunk):
    model, ids = small_model(loss_chunk_size=chunk), tokens(2, 9)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, model(ids, labels=ids).loss)


def test_a_loss_of_only_some_logits_is_refused():
    with pytest.raises(ValueError, match="logits_to_keep cannot be combined with labels"):
        small_model()(tokens(1, 5), labels=tokens(1, 5), logits_to_keep=1)


@pytest.mark.parametrize("whole", [True, False])
def test_tokens_that_are_none_are_refused_by_name(whole):
    model = small_model() if whole else small_model().model
    with pytest.raises(ValueError, match=r"input_ids must have shape \[B, T\], got \[5\]"):
        model(tokens(1, 5)[0])
    with pytest.raises(ValueError, match=r"input_ids must be a tensor .* got str; a tokenizer makes it from text"):
        model("once upon a time")
    with pytest.raises(ValueError, match=r"inputs_embeds must have shape \[B, T, D\]"):
        model(inputs_embeds=torch.zeros(5, model.config.hidden_size))
    size = model.config.vocab_size
    with pytest.raises(IndexError, match=rf"input_ids must lie in 0..{size - 1} .* got 1..{size}"):
        model(torch.tensor([[1, size]]))


def test_a_misspelt_field_of_a_config_is_named():
    with pytest.warns(UserWarning, match="num_head has no effect here; did you mean num_heads?"):
        small_config(num_head=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_config(architectures=["X"], torch_dtype="float32", elementwise_affine=True)  # others are kept, as ever


@pytest.mark.parametrize(
    ("fields", "without_effect"),
    [
        ({"mixer": "momentum_kda", "momentum": "nesterov", "use_momentum": False}, ["use_momentum", "momentum"]),
        ({"mixer": "momentum_kda", "mu_init": 10.0, "eta_activation": "one"}, ["eta_activation", "mu_init"]),
        ({"mixer": "kda", "gate_activation": "swish"}, ["gate_activation"]),
        ({"mixer": "deltanet", "use_short_conv": False}, ["use_short_conv"]),
        ({"mixer_options": {"tau_factor": 2}, "tau_factor": 4}, ["tau_factor"]),
        ({"attn": {"layers": [1], "num_heads": 4}, "window_size": 9}, ["window_size"]),
        ({"attn": {"layers": [0, 1], "num_heads": 4}, "min_log_mu": -1.0}, ["min_log_mu"]),
        ({"attn": {"layers": [1], "num_heads": 4}, "min_log_mu": -1.0}, []),
        ({"mixer": "mamba2", "num_heads": 2, "head_dim": 16}, []),  # its number of heads follows from the width
    ],
)
def test_a_field_that_no_mixer_of_the_model_reads_is_named(fields, without_effect):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = small_config(**fields)
    mixer, values = fields.get("mixer", "momentum_deltanet"), [getattr(config, name) for name in without_effect]
    assert [str(entry.message) for entry in caught] == [
        f"config: {name}={value!r} has no effect: no layer of this model (mixer {mixer!r}) reads it"
        for name, value in zip(without_effect, values)
    ]


def test_fields_of_shipped_configs_recipes_and_study_contestants_all_have_an_effect():
    studies = [(task, contestant(name)) for study in STUDIES.values() for task in study.tasks for name in CONTESTANTS]
    cells = [cell for name in ("quick", "rewrite", "paper") for cell in load_mqar_recipe(name).cells()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in shipped_configs():
            load_config(name)
        for name in packaged_recipes():
            model_config(load_recipe(name), 257, 256)
        for task, one in studies:
            MomentumDeltaNetConfig(**one.config_fields(task.model) | {"vocab_size": 64})
        for cell in cells:
            cell.config()
        for name in MODELS:
            small_config(name)
    assert len(studies) > 100


@torch.no_grad()
def test_the_gates_activation_reaches_every_mixer_that_has_a_choice():
    for mixer, own in (("gated_deltanet", "swish"), ("momentum_deltanet", "sigmoid")):
        x = torch.randn(1, 6, 32)
        layers = [small_model(mixer, **fields).model.layers[0].attn for fields in ({}, {"gate_activation": own})]
        assert torch.equal(layers[0](x), layers[1](x))
        other = "sigmoid" if own == "swish" else "swish"
        layer = small_model(mixer, gate_activation=other).model.layers[0].attn
        assert layer.o_norm.activation == other
        assert relative_error(layer(x), layers[0](x)) > 0.01


# ---------------------------------------------------------------------------------------------------------------- cache


@torch.no_grad()
@pytest.mark.parametrize(("cached", "new"), [(3, 1), (1, 3)])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_of_another_number_of_rows_is_refused(name, length, cached, new):
    model = small_model(name)
    cache = model(tokens(cached, 6), use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=f"past_key_values holds {cached} sequences in layer 0, but this call has {new}"
    ):
        model(tokens(new, length), past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "rwkv7", "linear_attention"])
def test_a_reset_cache_takes_another_batch(name):
    model, ids = small_model(name), tokens(3, 8)
    cache = model(ids[:1], use_cache=True).past_key_values
    cache.reset()
    found = [model(piece, past_key_values=cache).logits for piece in ids.split([5, 1, 2], dim=1)]
    assert relative_error(torch.cat(found, 1), model(ids).logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("fields", [{"attn": {"layers": [1], "num_heads": 4}}, {"mixer": "attention"}])
def test_a_window_of_any_width_decodes_from_a_cache(fields, window):
    attn = fields.get("attn")
    fields = {**fields, "attn": {**attn, "window_size": window}} if attn else {**fields, "window_size": window}
    model, ids = small_model(**fields), tokens(2, 12)
    expected = model(ids, use_cache=False).logits
    mask = torch.ones(2, 12, dtype=torch.long)
    for masked in (False, True):
        cache, found, seen = DynamicCache(config=model.config), [], 0
        for piece in ids.split([4, 1, 1, 3, 1, 1, 1], dim=1):
            seen += piece.shape[1]
            part = mask[:, :seen] if masked else None
            found.append(model(piece, past_key_values=cache, attention_mask=part).logits)
        assert relative_error(torch.cat(found, 1), expected) < 1e-5
    assert cache.layers[-1].keys.shape[2] == window - 1


@pytest.mark.parametrize("name", MODELS)
def test_the_states_of_a_cache_are_constants_in_every_mixer(name):
    """The loss of a continuation has the same gradients whether its prefix was computed with gradients or without."""
    model = small_model(name).double().train()
    ids = tokens(2, 12)

    def gradients(with_gradients, sizes):
        cache = DynamicCache(config=model.config)
        with torch.set_grad_enabled(with_gradients):
            for piece in ids[:, :7].split([4, 3], dim=1):
                model(piece, past_key_values=cache)
        losses = [
            model(piece, past_key_values=cache).logits.square().mean() for piece in ids[:, 7:].split(sizes, dim=1)
        ]
        return torch.autograd.grad(sum(losses), list(model.parameters()), allow_unused=True)

    for sizes in ([5], [2, 1, 1, 1]):
        for one, other in zip(gradients(True, sizes), gradients(False, sizes)):
            torch.testing.assert_close(one, other)


def test_a_single_token_after_a_cache_gives_gradients_to_the_mixer():
    for name in ("momentum_deltanet", "gated_deltanet", "rwkv7", "mamba2"):
        model = small_model(name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
            cache = model(tokens(1, 5), use_cache=True).past_key_values
        model(tokens(1, 1), past_key_values=cache).logits.square().sum().backward()
        mixer = model.model.layers[0].attn
        without = [key for key, p in mixer.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
        assert not without, (name, without)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_mixer_decodes_under_autocast(name):
    model, ids = small_model(name), tokens(2, 12)
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        found = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(8, 12)], 1)
    assert relative_error(found.float(), expected[:, 8:]) < 0.1


# --------------------------------------------------------------------------------------------------------- config flags


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_hidden_states_come_back_when_the_config_or_the_loading_call_says_so(name, tmp_path):
    model, ids = small_model(name), tokens(2, 5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_hidden_states=True)
    model.config.output_hidden_states = True
    for one in (model, loaded):
        assert len(one(ids).hidden_states) == len(one.model(ids).hidden_states) == 3
        assert one(ids, output_hidden_states=False).hidden_states is None


@torch.no_grad()
def test_tuples_come_back_when_the_config_says_so():
    model, ids = small_model(return_dict=False, use_cache=False), tokens(2, 5)
    logits, *rest = model(ids)
    assert not rest
    assert torch.equal(logits, model(ids, return_dict=True).logits)
    loss, logits = model(ids, labels=ids)
    assert loss.dim() == 0
    assert model.model(ids)[0].shape == (2, 5, 32)


def test_attention_weights_are_refused_wherever_they_are_requested():
    model = small_model("hybrid")
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(1, 3), output_attentions=True)
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(1, 3))


# ------------------------------------------------------------------------------------------------------- config values

ATTN = {"layers": [1], "num_heads": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer_options": {"hedim": 3}}, r"mixer_options has unknown keys \['hedim'\]; MomentumDeltaNet knows"),
        ({"mixer": "attention", "mixer_options": {"window": 3}}, r"mixer_options has unknown keys \['window'\]"),
        ({"mixer_options": [3]}, "mixer_options must be a mapping"),
        ({"attn": {**ATTN, "layers": [0.5]}}, r"attn\['layers'\] must be a list of layer numbers, got \[0.5\]"),
        ({"attn": {**ATTN, "layers": ["1"]}}, r"attn\['layers'\] must be a list of layer numbers"),
        ({"attn": {**ATTN, "layers": 1}}, r"attn\['layers'\] must be a list of layer numbers, got 1"),
        ({"attn": {**ATTN, "layers": [True]}}, r"attn\['layers'\] must be a list of layer numbers"),
        ({"attn": [1]}, "attn must be a mapping"),
        ({"attn": {**ATTN, "num_heads": 0}}, r"attn\['num_heads'\] must be a positive integer"),
        ({"attn": {**ATTN, "num_heads": -1}}, r"attn\['num_heads'\] must be a positive integer"),
        ({"attn": {**ATTN, "num_heads": 5}}, r"attn\['num_heads'\] must divide hidden_size=32"),
        ({"attn": {**ATTN, "num_kv_heads": 0}}, r"attn\['num_kv_heads'\] must be a positive integer"),
        ({"attn": {**ATTN, "window_size": "x"}}, r"attn\['window_size'\] must be a positive integer"),
        ({"attn": {**ATTN, "rope_theta": 0.0}}, r"attn\['rope_theta'\] must be a positive number"),
        ({"attn": {**ATTN, "qkv_bias": "no"}}, r"attn\['qkv_bias'\] must be true or false"),
        ({"attn": {**ATTN, "window_size": 3}, "mixer": "attention"}, r"attn\['window_size'\] must equal window_size"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0"),
        ({"rope_theta": None, "mixer": "attention"}, "rope_theta must be a positive number, got None"),
        ({"norm_eps": -1}, "norm_eps must be a positive number, got -1"),
        ({"norm_eps": float("nan")}, "norm_eps must be a positive number"),
        ({"hidden_ratio": -1}, "hidden_ratio must be a positive number"),
        ({"hidden_ratio": 0}, "hidden_ratio must be a positive number"),
        ({"expand_v": "two"}, "expand_v must be a positive number, got 'two'"),
        ({"num_heads": 0}, "num_heads must be a positive integer"),
        ({"num_attention_heads": 0}, "num_heads must be a positive integer"),
        ({"window_size": "x"}, "window_size must be a positive integer"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a positive integer"),
        ({"vocab_size": 2**62}, "vocab_size must be a positive integer up to"),
        ({"conv_size": 10**7}, "conv_size must be a positive integer up to"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a positive integer up to"),
        ({"use_gate": "false"}, "use_gate must be true or false, got 'false'"),
        ({"initializer_range": -1}, "initializer_range must be a number >= 0"),
        ({"min_log_mu": "low"}, "min_log_mu must be None or a number <= 0"),
        ({"pad_token_id": 61}, "pad_token_id must be None or a token below vocab_size=61"),
    ],
)
def test_values_that_no_model_can_have_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(**fields)


def test_options_of_the_momentum_layer_reach_its_constructor():
    model = small_model(mixer_options={"use_output_correction": False, "mode": "fused_recurrent"})
    assert not [name for name in model.state_dict() if "D_log" in name]
    assert model.model.layers[0].attn.rule.mode == "fused_recurrent"


def test_blockwise_momentum_refuses_a_backend_that_it_does_not_have():
    with pytest.raises(ValueError, match="blockwise momentum is computed by the torch backend only"):
        small_model(momentum_block_size=4, backend="cpu")(tokens(1, 8))
    assert small_model(momentum_block_size=4, backend="torch")(tokens(1, 8)).logits.isfinite().all()


def test_copying_a_config_keeps_every_field():
    config = small_config("hybrid", mixer_options={"tau_factor": 2})
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted({*MIXERS} - {"attention"}))
def test_a_backend_requested_by_name_is_also_the_one_that_decodes(name):
    model = small_model(name, backend="torch")
    cache = model(tokens(1, 4), use_cache=True).past_key_values
    mixer = model.model.layers[0].attn
    getattr(mixer, "rule", mixer).backend = "nonsense"
    with pytest.raises(ValueError, match="nonsense"):
        model(tokens(1, 1), past_key_values=cache)

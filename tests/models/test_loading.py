"""Configs, parameter counts, initialisation, saving and loading."""

import json
import math
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import mdn
from mdn.layers.init import INITIALISERS, initialiser_name
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM, MomentumDeltaNetModel
from mdn.models.info import load_config, model_facts, shipped_configs
from mdn.training.build import model_config
from mdn.training.recipe import validate
from small_models import AUTHORS_400M, MODELS, small_config, small_model, tokens

AUTHORS_1B = {**AUTHORS_400M, "head_dim": 256, "hidden_size": 2048, "tau_factor": 8, "min_log_mu": -1.0}
AUTHORS_HYBRID = {
    **AUTHORS_400M, "num_heads": 8, "expand_v": 1, "num_hidden_layers": 24, "use_lora_gate": False,
    "attn": {"layers": [3, 7, 11, 15, 19, 23], "num_heads": 8, "qkv_bias": False, "rope_theta": 10000.0},
}  # fmt: skip


def mdn_layer_parameters(D, H, K, V, width=4):
    projections = D * (2 * H * K + 2 * H * V) + H * V * D + 4 * D * H  # q k, v g, o, a b m e
    return projections + width * (2 * H * K + H * V) + 6 * H + V  # convolutions, per-head parameters, norm


def attention_parameters(D):
    return 4 * D * D


def model_parameters(D, vocabulary, mixers, mlp):
    return 2 * vocabulary * D + sum(mixers) + len(mixers) * (3 * D * mlp + 2 * D) + D


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mdn_400M", model_parameters(1024, 50257, [mdn_layer_parameters(1024, 6, 128, 256)] * 21, 2816)),
        ("mdn_1.3B", model_parameters(2048, 50257, [mdn_layer_parameters(2048, 6, 256, 512)] * 21, 5632)),
        (
            "mdn_h_3to1_400M",
            model_parameters(
                1024, 50257, [mdn_layer_parameters(1024, 8, 128, 128)] * 18 + [attention_parameters(1024)] * 6, 2816
            ),
        ),
        (
            "mdn_h_7to1_400M",
            model_parameters(
                1024, 50257, [mdn_layer_parameters(1024, 8, 128, 128)] * 21 + [attention_parameters(1024)] * 3, 2816
            ),
        ),
        ("mdn_tiny", model_parameters(128, 257, [mdn_layer_parameters(128, 4, 32, 32)] * 2, 512)),
    ],
)
def test_parameter_counts_equal_those_computed_by_hand(name, expected):
    facts = model_facts(load_config(name))
    assert facts.total_parameters == expected
    assert sum(facts.parameters.values()) == expected


@pytest.mark.parametrize(
    ("authors", "ours"), [(AUTHORS_400M, "mdn_400M"), (AUTHORS_1B, "mdn_1.3B"), (AUTHORS_HYBRID, "mdn_h_3to1_400M")]
)
def test_the_authors_configs_load_unchanged_and_give_our_shipped_models(authors, ours, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(authors))
    found, expected = AutoConfig.from_pretrained(tmp_path).to_dict(), load_config(ours).to_dict()
    tokenizer = {"bos_token_id", "eos_token_id", "_name_or_path", "transformers_version"}
    assert {k: v for k, v in found.items() if k not in tokenizer} == {
        k: v for k, v in expected.items() if k not in tokenizer
    }
    assert all(found[key] == value for key, value in authors.items() if key != "attn")


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_config_builds_and_has_no_unknown_field(name):
    fields = json.loads(shipped_configs()[name].read_text())
    known = set(MomentumDeltaNetConfig.__dataclass_fields__) | {"model_type"}
    assert set(fields) <= known
    with torch.device("meta"):
        model = MomentumDeltaNetForCausalLM(load_config(name))
    assert model.config.num_hidden_layers == len(model.model.layers)


def test_hybrids_have_attention_exactly_at_the_listed_layers():
    for name, layers in (("mdn_h_3to1_400M", [3, 7, 11, 15, 19, 23]), ("mdn_h_7to1_400M", [7, 15, 23])):
        config = load_config(name)
        assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == layers
        assert [i for i in range(24) if config.mixer_name(i) == "attention"] == layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "transformer"}, "mixer must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_heads": "six"}, "num_heads"),
        ({"loss_chunk_size": 0}, "loss_chunk_size"),
        ({"use_l2warp": True}, "use_l2warp"),
        ({"attn": {"num_heads": 2}}, "attn"),
        ({"attn": {"layers": [1], "num_heads": 2, "window": 3}}, "unknown keys \\['window'\\]"),
        ({"attn": {"layers": [5], "num_heads": 2}}, "layers"),
    ],
)
def test_bad_config_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config(**fields)


# --------------------------------------------------------------------------------------------------------- save, load


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_saving_and_loading_is_bit_exact_and_initialises_nothing(name, fields, tmp_path):
    model = small_model(name, **fields)
    for parameter in model.parameters():  # values that no initialiser would give
        parameter.add_(torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded, report = MomentumDeltaNetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    differing = {"_name_or_path", "architectures", "transformers_version", "dtype"}
    for field, value in model.config.to_dict().items():
        assert field in differing or loaded.config.to_dict()[field] == value, field
    for (key, expected), found in zip(model.state_dict().items(), loaded.state_dict().values()):
        assert torch.equal(found, expected), key
    assert torch.equal(loaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "momentum_deltanet"])
def test_a_directory_of_an_earlier_version_is_the_model_that_it_was(name, tmp_path):
    """It says that the gate is a sigmoid whatever the mixer's is, because nothing but momentum_deltanet read the
    field."""
    model = small_model(name)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    del saved["mdn_version"]
    path.write_text(json.dumps(saved | {"gate_activation": "sigmoid"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        configs = [load_config(str(path)), load_config(str(tmp_path))]
        recipe = validate({"name": "again", "model": {"config": str(path)}, "training": {"steps": 1}}, "again")
        configs.append(model_config(recipe, 61, 1))
    assert torch.equal(loaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)
    assert {config.gate_activation for config in configs} <= {None, model.config.gate_activation, "sigmoid"}
    for config in configs:
        again = MomentumDeltaNetForCausalLM(config)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again.eval()(tokens(2, 20)).logits, model(tokens(2, 20)).logits)


def test_a_chosen_gate_is_saved_and_loaded(tmp_path):
    small_model("gated_deltanet", gate_activation="sigmoid").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.gate_activation == "sigmoid"
    assert json.loads((tmp_path / "config.json").read_text())["mdn_version"] == mdn.__version__
    assert type(config).from_dict(config.to_dict()).gate_activation == "sigmoid"


def test_auto_classes_know_the_model(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MomentumDeltaNetConfig)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), MomentumDeltaNetForCausalLM)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, MomentumDeltaNetModel)
    assert torch.equal(base.embeddings.weight, model.model.embeddings.weight)


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = small_model(tie_word_embeddings=True), small_model()
    assert tied.lm_head.weight is tied.model.embeddings.weight
    assert untied.lm_head.weight is not untied.model.embeddings.weight


def test_gate_parameters_stay_float32_in_a_model_loaded_in_bfloat16(tmp_path):
    small_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gates = set(model.no_weight_decay_names())
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == gates
    assert model(tokens(1, 9)).logits.dtype == torch.bfloat16


def test_a_part_that_is_missing_in_the_checkpoint_is_initialised_and_reported(tmp_path):
    small_model(use_output_correction=False).save_pretrained(tmp_path)
    model, report = MomentumDeltaNetForCausalLM.from_pretrained(
        tmp_path, use_output_correction=True, output_loading_info=True
    )
    assert set(report["missing_keys"]) == {f"model.layers.{i}.attn.D_log" for i in range(2)}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# ----------------------------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_named_initialiser(name):
    model = small_model(name)
    for module in model.modules():
        for parameter, _ in module.named_parameters(recurse=False):
            assert initialiser_name(module, parameter) in INITIALISERS


@pytest.mark.parametrize("name", MODELS)
def test_meta_then_nan_filled_then_init_leaves_no_nan_and_gives_the_same_model(name):
    config = small_config(name)
    with torch.device("meta"):
        model = MomentumDeltaNetForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    for module in model.modules():
        module._is_hf_initialized = False
    torch.manual_seed(7)
    model.init_weights()
    assert [key for key, p in model.named_parameters() if not p.isfinite().all()] == []
    other = MomentumDeltaNetForCausalLM(config)
    torch.manual_seed(7)
    for module in other.modules():
        module._is_hf_initialized = False
    other.init_weights()
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)


def test_a_parameter_without_an_initialiser_is_an_error_that_says_where_to_add_it():
    model, surprise = small_model(), type("Surprise", (torch.nn.Module,), {})()
    surprise.odd = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"no initialiser for .*Surprise\.odd"):
        model._init_weights(surprise)


def test_initial_values_follow_the_released_code():
    torch.manual_seed(0)
    model = MomentumDeltaNetForCausalLM(small_config(num_hidden_layers=1, hidden_size=512, num_heads=512, head_dim=2))
    layer = model.model.layers[0].attn
    for name, high in (("A_log", 16), ("Mu_log", 16), ("log_factor", 4), ("D_log", 1)):
        value = getattr(layer, name).exp()
        assert 0 < value.min() < 0.05 * high
        assert 0.95 * high < value.max() <= high
        assert abs(value.mean() / high - 0.5) < 0.05
    step = torch.nn.functional.softplus(layer.dt_bias)
    assert 1e-3 <= step.min() < 1.1e-3
    assert 0.09 < step.max() <= 0.1001
    assert abs(step.log().mean() - math.log(1e-2)) < 0.15
    assert torch.equal(layer.mu_bias, layer.dt_bias)
    assert layer.q_proj.weight.std().item() == pytest.approx(0.1, rel=0.02)
    assert layer.q_conv1d.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(layer.o_norm.weight, torch.ones_like(layer.o_norm.weight))


def test_two_layers_are_not_initialised_alike():
    first, second = (block.attn for block in small_model().model.layers)
    assert not torch.equal(first.A_log, second.A_log)
    assert not torch.equal(first.q_proj.weight, second.q_proj.weight)


def test_the_padding_token_starts_at_zero():
    assert small_model(pad_token_id=5).model.embeddings.weight[5].abs().max() == 0


def test_gate_parameters_are_the_ones_that_are_not_decayed():
    names = small_model("hybrid").no_weight_decay_names()
    own = ("A_log", "dt_bias", "Mu_log", "mu_bias", "log_factor", "D_log")
    assert sorted(names) == sorted(f"model.layers.0.attn.{name}" for name in own)


# -------------------------------------------------------------------------------------------------------------- facts


def test_state_bytes_equal_what_the_cache_really_holds():
    for name in ("momentum_deltanet", "hybrid", "no convolution"):
        model = small_model(name)
        facts = model_facts(model.config, context=40, element_bytes=4)
        cache = model(tokens(1, 40), use_cache=True).past_key_values
        held = 0
        for layer in cache.layers:
            states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
            held += sum(x.nbytes for x in (*states, layer.keys, layer.values) if x is not None)
        assert sum(facts.state_bytes.values()) == held


def test_flops_are_two_per_linear_weight_plus_the_rules_own_operations():
    config = small_config("hybrid")
    facts = model_facts(config, context=100)
    D, H, K, V, mlp = 32, 4, 8, 16, 48
    mdn = 2 * D * (2 * H * K + 3 * H * V + 4 * H) + 10 * H * K * V + 2 * 4 * (2 * H * K + H * V)
    attention = 2 * (2 * D * D + 2 * D * D // 2) + 4 * 100 * D
    assert facts.forward_flops_per_token == mdn + attention + 2 * (2 * 3 * D * mlp) + 2 * D * config.vocab_size
    assert facts.training_flops_per_token == 3 * facts.forward_flops_per_token


@pytest.mark.slow
def test_a_400M_model_builds_on_cpu_and_takes_a_training_step():
    torch.manual_seed(0)
    model = MomentumDeltaNetForCausalLM(load_config("mdn_400M")).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(0, 50257, (1, 128))
    losses = []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(50257), rel=0.05)
    assert losses[1] < losses[0]

"""`mdn convert`: whole models of FLA and transformers keep their logits, and what does not fit is named."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fla_on_cpu import fla_on_cpu  # noqa: F401
from mdn.cli import main
from mdn.models import MomentumDeltaNetForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fla.models as fla_models

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 3, "eos_token_id": 4}
FLA = {
    "GatedDeltaNet": {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "intermediate_size": 48},
    "Comba": {"head_dim": 8, "num_heads": 4, "intermediate_size": 48, "use_inner_decay": True},
    "KDA": {"head_dim": 8, "num_heads": 2, "hidden_ratio": 2},
    "DeltaNet": {"num_heads": 4, "use_gate": True, "norm_eps": 1e-3},
    "GLA": {"num_heads": 4, "use_short_conv": True},
    "LinearAttention": {"num_heads": 4, "norm_feature_map": True, "feature_map": "elu"},
    "Mamba2": {"head_dim": 8, "num_heads": 8, "state_size": 16},
    "RWKV7": {"head_dim": 8, "fuse_norm": False, "intermediate_size": 64},
}
TRANSFORMERS = {
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "rope_theta": 500.0},
    "Qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": True},
    "Mistral": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "sliding_window": 7},
    "Mamba2": {"head_dim": 8, "num_heads": 8, "state_size": 16, "n_groups": 2},
}


def randomised(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def save(model, folder):
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def check_converted(theirs, tmp_path, capsys):
    source, target = save(theirs, tmp_path / "source"), tmp_path / "made" / "target"
    assert main(["convert", str(source), str(target), "--json", str(tmp_path / "facts.json")]) == 0
    assert "tensors matched" in capsys.readouterr().out
    ours = MomentumDeltaNetForCausalLM.from_pretrained(target).eval()
    ids = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(2))
    expected, found = theirs(ids, use_cache=False).logits, ours(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert ours.config.bos_token_id == 3
    assert (target / "tokenizer.json").is_file()
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert set(facts["matched"].values()) == set(load_file(source / "model.safetensors"))


@pytest.mark.parametrize("name", FLA)
def test_a_model_of_fla_keeps_its_logits(fla_on_cpu, name, tmp_path, capsys):  # noqa: F811
    config = getattr(fla_models, f"{name}Config")(**SMALL, **FLA[name])
    check_converted(randomised(getattr(fla_models, f"{name}ForCausalLM")(config)), tmp_path, capsys)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_model_of_transformers_keeps_its_logits(name, tmp_path, capsys):
    config = getattr(transformers, f"{name}Config")(**SMALL, **TRANSFORMERS[name])
    check_converted(randomised(getattr(transformers, f"{name}ForCausalLM")(config)), tmp_path, capsys)


def test_the_attention_layers_of_a_hybrid_of_fla_find_their_place(tmp_path, capsys):
    attention = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": False, "window_size": None}
    config = fla_models.GatedDeltaNetConfig(**SMALL, **FLA["GatedDeltaNet"])
    model = randomised(fla_models.GatedDeltaNetForCausalLM(config))
    source = save(model, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    llama = transformers.LlamaConfig(**SMALL, **TRANSFORMERS["Llama"])
    donor = transformers.LlamaForCausalLM(llama).model.layers[1].self_attn.state_dict()
    weights = {name: value for name, value in weights.items() if ".1.attn." not in name}
    weights |= {f"model.layers.1.attn.{name}": value for name, value in donor.items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | {"attn": attention}
    (source / "config.json").write_text(json.dumps(settings))
    assert main(["convert", str(source), str(tmp_path / "target")]) == 0
    ours = MomentumDeltaNetForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(ours.model.layers[1].attn.k_proj.weight, donor["k_proj.weight"])


@pytest.fixture
def llama(tmp_path):
    config = transformers.LlamaConfig(**SMALL, **TRANSFORMERS["Llama"])
    return save(randomised(transformers.LlamaForCausalLM(config)), tmp_path / "source")


def failed(source, target, capsys) -> str:
    assert main(["convert", str(source), str(target)]) == 2
    assert not target.exists() or not any(target.iterdir())
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]
    return capsys.readouterr().err


def test_every_parameter_that_does_not_fit_is_named_and_nothing_is_written(llama, tmp_path, capsys):
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.0.extra.weight"] = torch.zeros(3)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 5)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    message = failed(llama, tmp_path / "target", capsys)
    assert "19 parameters matched, 3 did not" in message
    assert "model.layers.0.extra.weight has no place in the model" in message
    assert "model.layers.1.mlp.up_proj.weight has shape [5, 5], expected [48, 32]" in message
    assert "model.layers.0.attn.q_proj.weight was not found" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "cannot convert model_type 'gpt2'; known are momentum_deltanet, gated_deltanet"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type must be 'default', got 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ],
)
def test_a_setting_without_a_counterpart_is_named(llama, tmp_path, capsys, changes, message):
    settings = json.loads((llama / "config.json").read_text()) | changes
    (llama / "config.json").write_text(json.dumps(settings))
    assert message in failed(llama, tmp_path / "target", capsys)


def test_a_torn_file_is_named(llama, tmp_path, capsys):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors is not a complete safetensors file" in failed(llama, tmp_path / "target", capsys)


def test_an_existing_directory_is_not_overwritten(llama, tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine.txt").write_text("precious")
    assert main(["convert", str(llama), str(tmp_path / "target")]) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err
    assert (tmp_path / "target" / "mine.txt").read_text() == "precious"


def test_a_directory_without_a_model_is_refused(tmp_path, capsys):
    assert "it has no config.json" in failed(tmp_path / "nothing", tmp_path / "target", capsys)

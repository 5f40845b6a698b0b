"""Every model that ``save_pretrained`` writes is served; what cannot be served is refused with a reason."""

from __future__ import annotations

import pytest
import torch

from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from served_engine import engine, expected_tokens, tokens_of

FIELDS = {"hidden_size": 64, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 16, "intermediate_size": 64}
VARIANTS: dict[str, dict] = {
    **{name: {"mixer": name} for name in MIXERS},
    "rwkv7 with its channel mixing": {
        "mixer": "rwkv7",
        "mlp": "rwkv7",
        "norm": "layernorm",
        "norm_embeddings": True,
    },
    "rwkv7 with attention": {"mixer": "rwkv7", "mlp": "rwkv7", "attn": {"layers": [1], "num_heads": 2}},
    "mamba2 with attention": {"mixer": "mamba2", "attn": {"layers": [0, 2], "num_heads": 2}},
    "attention in a window": {"mixer": "attention", "window_size": 9},
    "hybrid in a window": {"attn": {"layers": [2], "num_heads": 2, "num_kv_heads": 1, "window_size": 9}},
    "normalised linear attention": {"mixer": "linear_attention", "mixer_options": {"do_feature_map_norm": True}},
    "no convolutions": {"use_short_conv": False},
    "grouped value heads": {"num_v_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
    "no momentum": {"use_momentum": False},
    "short blocks": {"momentum_block_size": 1, "attn_mode": "fused_recurrent"},
}
VARIANTS["mamba2"] |= {"mixer_options": {"state_size": 16, "head_dim": 16}, "use_mlp": False}
VARIANTS["mamba2 with attention"] |= {"mixer_options": {"state_size": 16, "head_dim": 16}}
VOCABULARY = 100


def save_model(directory, dtype=torch.float32, **fields):
    """A model in which every part matters: also parameters that start at zero get random values."""
    torch.manual_seed(3)
    config = MomentumDeltaNetConfig(
        vocab_size=VOCABULARY, initializer_range=0.2, bos_token_id=None, eos_token_id=None, **{**FIELDS, **fields}
    )
    model = MomentumDeltaNetForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(directory)
    return model


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_saved_model_is_served_without_conversion(name, tmp_path, monkeypatch):
    model = save_model(tmp_path, **VARIANTS[name])
    prompts = prompts_of(1, 7, 40, 90)
    pieces = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 32}
    with engine(tmp_path, monkeypatch, enable_prefix_caching=True, block_size=32, **pieces) as served:
        found = [tokens_of(served.run(prompts, every=every)) for every in (1, 0)]
    assert found == [expected_tokens(model, prompts)] * 2


def test_bfloat16_keeps_the_gates_in_float32_and_stays_near_the_float32_model(tmp_path, monkeypatch):
    model = save_model(tmp_path, torch.bfloat16)
    with engine(tmp_path, monkeypatch, dtype="bfloat16") as served:
        runner = served.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        weights = dict(runner.model.named_parameters())
        kept = {name.rpartition(".")[2] for name, weight in weights.items() if weight.dtype == torch.float32}
        mixer = model.model.layers[0].attn
        assert kept == {name for name in mixer.no_weight_decay if getattr(mixer, name) is not None}
        output = served.run(prompts_of(60), logprobs=1)[0].outputs[0]
    with torch.no_grad():
        ids = torch.tensor([prompts_of(60)[0] + list(output.token_ids)])
        expected = model.float()(ids).logits[0, 59:-1].log_softmax(-1)
    for place, token in enumerate(output.token_ids):
        assert output.logprobs[place][token].logprob == pytest.approx(float(expected[place, token]), abs=0.1)


def test_compiled_graphs_give_the_same_tokens(tmp_path, monkeypatch):
    model = save_model(tmp_path, attn={"layers": [2], "num_heads": 2})
    prompts = prompts_of(1, 7, 40, 90)
    with engine(tmp_path, monkeypatch, enforce_eager=False) as served:
        found = tokens_of(served.run(prompts, every=1))
    assert found == expected_tokens(model, prompts)


def test_more_tokens_than_in_training_are_possible_on_request(tmp_path, monkeypatch):
    model = save_model(tmp_path, max_position_embeddings=64)
    prompts = prompts_of(150)
    with engine(tmp_path, monkeypatch, max_model_len=200) as served:
        assert tokens_of(served.run(prompts)) == expected_tokens(model, prompts)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding is not supported",
        ),
        ({"quantization": "fp8", "dtype": "bfloat16"}, "quantization='fp8' is not supported"),
        ({"mamba_ssm_cache_dtype": "float16"}, "mamba_ssm_cache_dtype='float16'"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(arguments, reason, tmp_path, monkeypatch):
    save_model(tmp_path)
    with pytest.raises((ValueError, NotImplementedError), match=reason), engine(tmp_path, monkeypatch, **arguments):
        pass


def test_packed_weights_are_refused(tmp_path, monkeypatch):
    save_model(tmp_path).quantize("int8").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="packed weights"), engine(tmp_path, monkeypatch):
        pass


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    save_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.attn.mu_bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="mu_bias"), engine(tmp_path, monkeypatch):
        pass

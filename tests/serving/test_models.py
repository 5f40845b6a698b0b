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


@pytest.mark.parametrize("name", ["momentum_deltanet", "gated_deltanet", "mamba2", "hybrid in a window"])
def test_bfloat16_is_as_exact_as_transformers_in_bfloat16(name, tmp_path, monkeypatch):
    """Against the float32 model with the same weights: vLLM adds no error of its own, and keeps the same in float32."""
    save_model(tmp_path, torch.bfloat16, **VARIANTS[name])
    rounded = MomentumDeltaNetForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact = MomentumDeltaNetForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = prompts_of(7, 60, 150, 200)
    pieces = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 32}
    with engine(tmp_path, monkeypatch, dtype="bfloat16", **pieces) as served:
        runner = served.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        kept = {name.replace(".mixer.", ".") for name, weight in runner.model.named_parameters() if is_float32(weight)}
        outputs = served.run(prompts, every=2, prompt_logprobs=0, logprobs=0)
        assert served.counters.resumed_prompts > 0
        assert served.counters.mixed_steps > 0
    assert kept == {name for name, weight in rounded.named_parameters() if is_float32(weight)}
    errors = [bfloat16_errors(output, rounded, exact) for output in outputs]
    served_error, rounded_error, difference = torch.cat(errors, dim=1).square().mean(1).sqrt()
    assert 0 < served_error < 1.25 * rounded_error
    assert difference < 1.5 * rounded_error


def is_float32(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32


def bfloat16_errors(output, rounded, exact) -> torch.Tensor:
    """``[3, tokens]``: vLLM - exact, transformers - exact and vLLM - transformers, in logprobs of prompt and answer."""
    ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    served = torch.tensor([entry[token].logprob for entry, token in zip(entries, ids[1:].tolist())])
    with torch.no_grad():
        of_rounded, of_exact = (
            model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            for model in (rounded, exact)
        )
    return torch.stack([served - of_exact, of_rounded - of_exact, served - of_rounded])


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
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"enable_lora": True}, "LoRA adapters are not supported"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding is not supported",
        ),
        ({"quantization": "fp8", "dtype": "bfloat16"}, "quantization='fp8' is not supported"),
        ({"mamba_cache_dtype": "float16"}, "mamba_cache_dtype='float16'"),
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

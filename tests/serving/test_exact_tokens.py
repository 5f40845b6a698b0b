"""vLLM gives the tokens of transformers' ``generate``, however it batches, cuts and caches the prompts."""

from __future__ import annotations

import pytest
import torch

from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.run import train
from served_engine import engine, expected_tokens, tokens_of
from training_support import tiny_recipe

FIELDS = {"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 2, "head_dim": 16, "intermediate_size": 64}
MODELS: dict[str, dict] = {
    "momentum_deltanet": {},
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "kda": {"mixer": "kda"},
    "mamba2": {"mixer": "mamba2", "mixer_options": {"state_size": 16, "head_dim": 16}, "use_mlp": False},
    "hybrid": {"attn": {"layers": [3], "num_heads": 2}},
}
LENGTHS = (1, 2, 3, 5, 17, 31, 48, 49, 64, 65, 96, 130, 200, 333, 500, 1000)
VOCABULARY = 256
NEW = 30


def random_prompts() -> list[list[int]]:
    """One of each length, and two more that begin like the longest one."""
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]
    return [*prompts, [*prompts[-1][:500], 7], [*prompts[-1][:700], 8, 9]]


@pytest.fixture(scope="module", params=[f"{name}, {kind}" for name in MODELS for kind in ("random", "trained")])
def case(request, tmp_path_factory):
    """A model directory, its prompts, and what transformers continues them with."""
    name, kind = request.param.split(", ")
    root = tmp_path_factory.mktemp(name)
    fields = FIELDS | MODELS[name]
    if kind == "trained":
        recipe = tiny_recipe(root, model=fields, training={"steps": 30, "sequence_length": 64})
        train(recipe)
        directory = root / "run" / "model"
    else:
        torch.manual_seed(0)
        config = MomentumDeltaNetConfig(vocab_size=VOCABULARY, initializer_range=0.2, eos_token_id=None, **fields)
        directory = root / "model"
        MomentumDeltaNetForCausalLM(config).save_pretrained(directory)
    model = MomentumDeltaNetForCausalLM.from_pretrained(directory, dtype="float32").eval()
    model.generation_config.eos_token_id = None
    prompts = random_prompts()
    return directory, prompts, expected_tokens(model, prompts, NEW)


def test_one_continuous_batch_of_requests_that_arrive_at_different_times(case, monkeypatch):
    directory, prompts, expected = case
    with engine(directory, monkeypatch, max_num_batched_tokens=2048) as served:
        found = tokens_of(served.run(prompts, every=1, max_tokens=NEW))
        assert served.counters.most_requests >= 16
        assert served.counters.mixed_steps > 0
    assert found == expected


def test_prompts_in_pieces_of_48_tokens(case, monkeypatch):
    directory, prompts, expected = case
    with engine(directory, monkeypatch, max_num_batched_tokens=256, long_prefill_token_threshold=48) as served:
        found = tokens_of(served.run(prompts, max_tokens=NEW))
        assert served.counters.resumed_prompts >= sum(-(-len(prompt) // 48) - 1 for prompt in prompts)
        assert served.counters.mixed_steps > 0
    assert found == expected


def test_cached_prefixes_the_first_and_the_second_time(case, monkeypatch):
    directory, prompts, expected = case
    total = sum(map(len, prompts))
    with engine(
        directory, monkeypatch, enable_prefix_caching=True, block_size=32, max_num_batched_tokens=512
    ) as served:
        first = served.run(prompts, every=2, max_tokens=NEW)
        computed = served.counters.prompt_tokens
        second = served.run(prompts, max_tokens=NEW)
        again = served.counters.prompt_tokens - computed
        cached = sum(output.num_cached_tokens for output in second)
        assert cached > total // 2
        assert again <= total - cached + len(prompts)
        assert served.counters.mixed_steps > 0
    assert tokens_of(first) == expected
    assert tokens_of(second) == expected

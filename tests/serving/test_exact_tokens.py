"""vLLM gives the tokens of transformers' ``generate``, however it batches, cuts and caches the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.training.run import train
from served_engine import Continuation, engine, expected_continuations, expected_tokens, tokens_of
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


class Case(NamedTuple):
    """A model directory, the model, prompts, and how transformers continues them."""

    directory: Path
    model: MomentumDeltaNetForCausalLM
    prompts: list[list[int]]
    expected: list[Continuation]

    @property
    def tokens(self) -> list[list[int]]:
        return [continuation.tokens for continuation in self.expected]


@pytest.fixture(scope="module", params=[f"{name}, {kind}" for name in MODELS for kind in ("random", "trained")])
def case(request, tmp_path_factory):
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
    return Case(directory, model, prompts, expected_continuations(model, prompts, NEW))


def test_one_continuous_batch_of_requests_that_arrive_at_different_times(case, monkeypatch):
    with engine(case.directory, monkeypatch, max_num_batched_tokens=2048) as served:
        outputs = served.run(case.prompts, every=1, max_tokens=NEW, logprobs=3)
        assert served.counters.most_requests >= 16
        assert served.counters.mixed_steps > 0
    assert tokens_of(outputs) == case.tokens
    for output, (_, logprobs) in zip(outputs, case.expected):
        for place, entries in enumerate(output.outputs[0].logprobs):
            assert len(entries) >= 3
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(logprobs[place, token]), abs=1e-4)


def test_prompts_in_pieces_of_48_tokens(case, monkeypatch):
    with engine(case.directory, monkeypatch, max_num_batched_tokens=256, long_prefill_token_threshold=48) as served:
        found = tokens_of(served.run(case.prompts, max_tokens=NEW))
        assert served.counters.resumed_prompts >= sum(-(-len(prompt) // 48) - 1 for prompt in case.prompts)
        assert served.counters.mixed_steps > 0
    assert found == case.tokens


def test_cached_prefixes_the_first_and_the_second_time(case, monkeypatch):
    total = sum(map(len, case.prompts))
    caching = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 512}
    with engine(case.directory, monkeypatch, **caching) as served:
        first = served.run(case.prompts, every=2, max_tokens=NEW)
        computed = served.counters.prompt_tokens
        second = served.run(case.prompts, max_tokens=NEW)
        again = served.counters.prompt_tokens - computed
        cached = sum(output.num_cached_tokens for output in second)
        assert cached > total // 2
        assert again <= total - cached + len(case.prompts)
        assert served.counters.mixed_steps > 0
        assert served.counters.resumed_prompts > 0
    assert tokens_of(first) == case.tokens
    assert tokens_of(second) == case.tokens


def test_preempted_requests_continue_with_the_same_tokens(case, monkeypatch):
    prompts = [prompt[:70] for prompt in case.prompts if len(prompt) >= 70]
    pages = 10 if case.model.config.attn is None else 24  # attention needs more of them, the longer a sequence is
    pool = {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": pages, "max_num_seqs": 8}
    with engine(case.directory, monkeypatch, max_model_len=300, **pool) as served:
        found = tokens_of(served.run(prompts, max_tokens=150))
        assert served.counters.preemptions > 0
    assert found == expected_tokens(case.model, prompts, 150)

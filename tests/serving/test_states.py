"""States survive preemption, abort and several continuations of one prompt; and the tests notice when they do not."""

from __future__ import annotations

import pytest
import torch

from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.vllm.states import DecodeState, PrefillState
from served_engine import engine, expected_tokens, tokens_of

FIELDS = {"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 2, "head_dim": 16, "intermediate_size": 64}
HYBRID = {"attn": {"layers": [3], "num_heads": 2}}
VOCABULARY = 256
PIECES = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 48}


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(9)
    return [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


@pytest.fixture(scope="module", params=["momentum_deltanet", "hybrid"])
def served_model(request, tmp_path_factory):
    """A model directory and the model, with random weights."""
    return save_random_model(tmp_path_factory.mktemp("model"), **(HYBRID if request.param == "hybrid" else {}))


def save_random_model(directory, **fields):
    torch.manual_seed(1)
    config = MomentumDeltaNetConfig(
        vocab_size=VOCABULARY, initializer_range=0.2, bos_token_id=None, eos_token_id=None, **{**FIELDS, **fields}
    )
    model = MomentumDeltaNetForCausalLM(config).eval()
    model.save_pretrained(directory)
    return directory, model


# ------------------------------------------------------------------------------------------- faults that must be seen


def forget(number):
    """Continue a prompt with zeros for recurrent state ``number`` (1 is the momentum)."""
    initial = PrefillState.initial_recurrent

    def forgetful(state, asked=0):
        found = initial(state, asked)
        return torch.zeros_like(found) if asked == number else found

    return PrefillState, "initial_recurrent", forgetful


def forget_convolutions():
    conv = PrefillState.conv
    return PrefillState, "conv", lambda state, number=0: torch.zeros_like(conv(state, number))


def swap_two_slots():
    """The first two decoding requests get each other's states."""
    make = DecodeState.__init__

    def swapped(state, pages, convolutions, slots):
        order = torch.arange(len(slots))
        order[:2] = order[:2].flip(0)
        make(state, pages, convolutions, slots[order])

    return DecodeState, "__init__", swapped


@pytest.mark.parametrize("fault", [None, forget(0), forget(1), forget_convolutions(), swap_two_slots()])
def test_a_lost_or_swapped_state_changes_tokens(fault, served_model, monkeypatch):
    directory, model = served_model
    prompts = prompts_of(5, 60, 100, 130, 200, 300)
    if fault is not None:
        monkeypatch.setattr(*fault)
    with engine(directory, monkeypatch, **PIECES) as served:
        found = tokens_of(served.run(prompts))
    assert (found == expected_tokens(model, prompts)) == (fault is None)


# -------------------------------------------------------------------------------------------------- the pool of pages


def test_preempted_requests_continue_with_the_same_tokens(served_model, monkeypatch):
    directory, model = served_model
    prompts = prompts_of(*[70] * 8)
    pages = 10 if model.config.attn is None else 24  # attention needs more of them, the longer a sequence is
    pool = {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": pages, "max_num_seqs": 8}
    pool["max_model_len"] = 300
    with engine(directory, monkeypatch, **pool) as served:
        found = tokens_of(served.run(prompts, max_tokens=150))
        assert served.counters.preemptions > 0
    assert found == expected_tokens(model, prompts, 150)


def test_finished_and_aborted_requests_give_their_pages_back(served_model, monkeypatch):
    directory, model = served_model
    prompts = prompts_of(30, 90, 300, 20)
    with engine(directory, monkeypatch, **PIECES) as served:
        free = served.free_pages()
        names = [served.add(prompt, max_tokens=100) for prompt in prompts]
        for _ in range(5):  # one of them is still reading its prompt
            served.engine.step()
        assert served.free_pages() < free
        served.engine.abort_request(names)
        while served.engine.has_unfinished_requests():
            served.engine.step()
        assert served.free_pages() == free
        assert tokens_of(served.run(prompts)) == expected_tokens(model, prompts)
        assert served.free_pages() == free


# ----------------------------------------------------------------------------------------------------------- sampling


def test_logprobs_are_those_of_the_model(served_model, monkeypatch):
    directory, model = served_model
    prompts = prompts_of(1, 50, 200)
    with engine(directory, monkeypatch, max_logprobs=VOCABULARY, **PIECES) as served:
        outputs = served.run(prompts, logprobs=5)
    for prompt, output in zip(prompts, outputs):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1)
        assert len(output.outputs[0].logprobs) == len(tokens)
        for place, entries in enumerate(output.outputs[0].logprobs):
            assert len(entries) >= 5
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)


def test_sampling_follows_its_parameters(served_model, monkeypatch):
    directory, _ = served_model
    prompts = prompts_of(40, 41)
    with engine(directory, monkeypatch) as served:
        sampled = [tokens_of(served.run(prompts, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
        assert sampled[0] == sampled[1] != sampled[2]
        greedy = tokens_of(served.run(prompts))
        assert tokens_of(served.run(prompts, temperature=1.0, top_k=1)) == greedy
        several = served.run(prompts, n=3, temperature=1.0, seed=4)
        for output in several:
            assert len({tuple(part.token_ids) for part in output.outputs}) == 3
        stop = greedy[0][3]
        stopped = served.run(prompts[:1], stop_token_ids=[stop])[0].outputs[0]
        assert list(stopped.token_ids) == greedy[0][: greedy[0].index(stop) + 1]

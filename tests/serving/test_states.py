"""States are lost or swapped: the tests notice. Pages come back; a step makes one call and reads no value."""

from __future__ import annotations

import pytest
import torch
from vllm.config import CompilationConfig

from mdn.layers import MIXERS, TokenLayout
from mdn.layers.conv import CausalWindow
from mdn.layers.mixer import RECURRENT_LAYER_TYPE
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.models.modeling import MomentumDeltaNetBlock
from mdn.vllm import register
from mdn.vllm.states import DecodeState, PrefillState, recurrent_states
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


# ------------------------------------------------------------------------------------------------ the calls of a step


def test_a_step_calls_every_convolution_once_for_all_requests(served_model, monkeypatch):
    directory, model = served_model
    calls = []
    forward = CausalWindow.forward  # which `step` calls, too
    monkeypatch.setattr(CausalWindow, "forward", lambda *given, **named: calls.append(1) or forward(*given, **named))
    with engine(directory, monkeypatch, **PIECES) as served:
        calls.clear()
        served.run(prompts_of(5, 60, 100, 200), every=1)
        assert served.counters.mixed_steps > 0
        convolutions = 3 * model.config.layer_types.count(RECURRENT_LAYER_TYPE)
        assert len(calls) == convolutions * served.counters.steps


@pytest.mark.parametrize("mixer", sorted(set(MIXERS) - {"attention"}))
def test_a_decode_step_reads_no_value_of_a_tensor(mixer):
    """So that it never waits for a GPU and a CUDA graph can capture it: it runs on tensors that have no values."""
    options = {"state_size": 16, "head_dim": 16} if mixer == "mamba2" else None
    config = MomentumDeltaNetConfig(vocab_size=VOCABULARY, **{**FIELDS, "mixer": mixer, "mixer_options": options})
    states = recurrent_states(config, torch.bfloat16)
    with torch.device("meta"), torch.no_grad():
        block = MomentumDeltaNetBlock(config, 0).to(torch.bfloat16)
        pages = tuple(torch.empty(9, *state.shape, dtype=state.dtype) for state in states.all)
        state = DecodeState(pages, len(states.conv), torch.empty(5, dtype=torch.int64))
        tokens = torch.empty(5, 1, config.hidden_size, dtype=torch.bfloat16)
        assert block.attn.mix(tokens, TokenLayout((5, 1)), state).shape == tokens.shape


def test_the_op_writes_into_the_tensor_that_it_is_given():
    """A CUDA graph that continues after it reads an address that must not change."""
    hidden_states, output, _ = torch.ops.mdn.serve_mixer.default._schema.arguments
    assert not hidden_states.is_write
    assert output.is_write
    assert torch.ops.mdn.serve_mixer.default._schema.returns == []
    register()
    assert "mdn::serve_mixer" in CompilationConfig._attention_ops


# -------------------------------------------------------------------------------------------------- the pool of pages


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

"""Generation: greedy, sampling, beams, left padding, chunked prefill, saved caches; and what is refused."""

import copy
import itertools

import pytest
import torch
import transformers
from accelerate import cpu_offload
from packaging.version import Version
from transformers import DynamicCache

from small_models import MODELS, VOCABULARY, small_model, tokens


def greedy_by_hand(model, ids, count):
    """The definition: the full forward pass for every token, no cache."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def generate(model, ids, count=6, **arguments):
    if ids is not None:  # generate() would take tokens that equal pad_token_id for padding
        arguments.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=count, pad_token_id=0, **{"do_sample": False, **arguments})


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_with_a_cache_equals_the_definition_and_itself_without(name):
    model = small_model(name)
    ids = tokens(2, 9)
    expected = greedy_by_hand(model, ids, 6)
    assert generate(model, ids).equal(expected)
    assert generate(model, ids, use_cache=False).equal(expected)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_every_row_of_a_ragged_left_padded_batch_generates_as_if_alone(name, chunk):
    model = small_model(name)
    ids = tokens(3, 11)
    lengths = [3, 11, 1]
    mask = torch.stack([(torch.arange(11) >= 11 - length).long() for length in lengths])
    found = generate(model, ids, attention_mask=mask, prefill_chunk_size=chunk)
    for row, length in enumerate(lengths):
        assert found[row, -length - 6 :].equal(greedy_by_hand(model, ids[row : row + 1, -length:], 6)[0])


@torch.no_grad()
def test_a_padded_batch_of_one_generates_as_the_row_alone():
    model = small_model()
    ids = tokens(1, 11)
    mask = (torch.arange(11) >= 4).long()[None]
    assert generate(model, ids, attention_mask=mask)[:, 4:].equal(greedy_by_hand(model, ids[:, 4:], 6))


@torch.no_grad()
def test_sampling_with_a_seed_is_the_same_with_and_without_a_cache():
    model = small_model("hybrid")
    ids = tokens(2, 9)

    def sampled(**arguments):
        torch.manual_seed(3)
        return generate(model, ids, 12, do_sample=True, temperature=1.3, top_p=0.9, **arguments)

    assert sampled().equal(sampled(use_cache=False))
    assert not sampled().equal(greedy_by_hand(model, ids, 12))


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid", "hybrid with a window"])
def test_beam_search_finds_what_brute_force_finds(name):
    """With as many beams as there are prefixes the search is exhaustive, so its best must be the best of all."""
    vocabulary, count = 4, 3
    model = small_model(name, vocab_size=vocabulary, initializer_range=0.5)
    prompt = torch.tensor([[1, 3, 0, 2, 2]])
    endings = torch.tensor(list(itertools.product(range(vocabulary), repeat=count)))
    every = torch.cat([prompt.expand(len(endings), -1), endings], dim=1)
    scores = model(every).logits.log_softmax(-1)[:, prompt.shape[1] - 1 : -1].gather(-1, endings[..., None]).sum((1, 2))
    best = every[scores.argsort(descending=True)]
    found = generate(model, prompt, count, num_beams=vocabulary**count, num_return_sequences=3)
    assert found.equal(best[:3])


@torch.no_grad()
def test_beam_search_in_a_left_padded_batch_equals_each_row_alone():
    model = small_model("hybrid", initializer_range=0.4)
    ids = tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    found = generate(model, ids, attention_mask=mask, num_beams=3)
    assert found[0, 3:].equal(generate(model, ids[:1, 3:], num_beams=3)[0])
    assert found[1].equal(generate(model, ids[1:], num_beams=3)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_generation_continues_from_a_cache_that_already_holds_the_beginning(name, chunk, request):
    if chunk is not None and Version(transformers.__version__) < Version("5.20"):
        reason = "transformers 5.19 cuts the whole prompt into pieces, also what the cache holds already"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    model = small_model(name)
    ids = tokens(2, 12)
    cache = DynamicCache(config=model.config)
    model(ids[:, :7], past_key_values=cache, use_cache=True)
    found = generate(model, ids, past_key_values=cache, prefill_chunk_size=chunk)
    assert found.equal(greedy_by_hand(model, ids, 6))


@torch.no_grad()
def test_a_cache_returned_by_generate_can_be_used_for_the_next_turn():
    model = small_model("hybrid")
    ids = tokens(1, 6)
    first = generate(model, ids, 4, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(1, 3, seed=9)], dim=1)
    found = generate(model, turn, 5, past_key_values=first.past_key_values)
    assert found.equal(greedy_by_hand(model, turn, 5))


@pytest.mark.parametrize("name", [*MODELS, "rwkv7 with its own blocks"])
def test_a_turn_in_inference_mode_and_one_outside_may_follow_each_other(name):
    fields = {"mixer": "rwkv7", "mlp": "rwkv7"} if name == "rwkv7 with its own blocks" else {}
    model = small_model(name, **fields)
    ids, cache = tokens(2, 6), None
    for turn, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)):
        with mode():
            found = generate(model, ids, 5, past_key_values=cache, return_dict_in_generate=True)
            cache = copy.deepcopy(found.past_key_values) if turn == 2 else found.past_key_values
        assert found.sequences.equal(generate(model, ids, 5, use_cache=False))
        ids = torch.cat([found.sequences, tokens(2, 3, seed=turn)], dim=1)
    model.train()(ids[:, -3:], labels=ids[:, -3:], past_key_values=cache).loss.backward()


def test_the_beams_of_inference_mode_leave_a_cache_that_can_be_continued():
    model, ids = small_model(), tokens(1, 6)

    def continued(mode: type) -> torch.Tensor:
        with mode():
            cache = generate(model, ids, 4, num_beams=2, return_dict_in_generate=True).past_key_values
            cache.batch_select_indices(torch.tensor([0]))
        with torch.no_grad():
            model(ids[:, :1], past_key_values=cache)
            return model(ids, past_key_values=cache).logits

    torch.testing.assert_close(continued(torch.inference_mode), continued(torch.no_grad))


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, "mamba2 with groups"])
def test_weights_may_be_elsewhere_until_a_module_is_called(name):
    """accelerate brings the weights of every module for its call and takes them away again."""
    fields = {"mixer": "mamba2", "mixer_options": {"n_groups": 2}} if name == "mamba2 with groups" else {}
    model, ids = small_model(name, **fields), tokens(2, 9)
    expected = generate(model, ids)
    assert generate(cpu_offload(model, execution_device="cpu"), ids).equal(expected)


@torch.no_grad()
def test_several_samples_per_prompt_and_prompts_given_as_embeddings():
    model = small_model()
    ids = tokens(1, 5)
    torch.manual_seed(0)
    many = generate(model, ids, 8, do_sample=True, num_return_sequences=4)
    assert many.shape == (4, 13)
    assert len({tuple(row.tolist()) for row in many}) > 1
    embedded = generate(model, None, inputs_embeds=model.get_input_embeddings()(ids))
    assert embedded.equal(greedy_by_hand(model, ids, 6)[:, 5:])


@torch.no_grad()
def test_assisted_decoding_is_refused_clearly():
    model = small_model()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, tokens(1, 5), assistant_model=small_model(seed=1))
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, tokens(1, 5), prompt_lookup_num_tokens=3)


@torch.no_grad()
def test_decode_steps_do_not_read_the_mask_on_the_host(monkeypatch):
    """A host read per token would stall a GPU; unpadding may happen in the prefill only."""
    from mdn.ops.boundaries import SequenceBoundaries

    model = small_model("hybrid")
    widths = []
    original = SequenceBoundaries.from_attention_mask

    def counted(mask):
        widths.append(mask.shape[1])
        return original(mask)

    monkeypatch.setattr(SequenceBoundaries, "from_attention_mask", staticmethod(counted))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    generate(model, tokens(2, 5), attention_mask=mask)
    assert widths == [5]


@torch.no_grad()
def test_logits_to_keep_gives_the_last_logits_only():
    model = small_model()
    ids = tokens(2, 9)
    full = model(ids).logits
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, VOCABULARY)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, full[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, full[:, [0, 5]])


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid", "gated_deltanet", "rwkv7"])
def test_a_decode_step_is_one_graph_to_the_compiler(name):
    model, ids = small_model(name), tokens(2, 10)
    expected = model(ids).logits[:, 6:]
    torch.compiler.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    found = [step(ids[:, t : t + 1], past_key_values=cache, all_tokens_valid=True).logits for t in range(6, 10)]
    assert (torch.cat(found, 1) - expected).abs().max() <= 1e-5 * expected.abs().max()

"""Full forward = chunked prefill = token-by-token decode, for every mixer and for hybrids; padding; causality."""

import copy
import io

import pytest
import torch
from transformers import DynamicCache

from definition import relative_error
from mdn.layers import ShortConvolution
from small_models import MODELS, small_model, tokens

TOLERANCE = 1e-5
LENGTHS = [1, 3, 63, 64, 65, 1000]


def in_pieces(model, ids, sizes, mask=None, cache=None):
    """Logits of ``ids`` fed piece by piece into one cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    outputs, seen = [], 0
    for piece in ids.split(sizes, dim=1):
        seen += piece.shape[1]
        part = None if mask is None else mask[:, :seen]
        outputs.append(model(piece, attention_mask=part, past_key_values=cache, use_cache=True).logits)
    return torch.cat(outputs, dim=1)


def piece_sizes(length: int, piece: int) -> list[int]:
    return [piece] * (length // piece) + ([length % piece] if length % piece else [])


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_full_forward_equals_chunked_prefill_equals_decoding(name, length):
    model = small_model(name)
    ids = tokens(1, length)
    expected = model(ids, use_cache=False).logits
    assert relative_error(in_pieces(model, ids, piece_sizes(length, 24)), expected) < TOLERANCE
    assert relative_error(in_pieces(model, ids, [1] * length), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_mixer_continues_from_its_cache(name):
    model = small_model(name)
    ids = tokens(2, 70)
    expected = model(ids, use_cache=False).logits
    assert relative_error(in_pieces(model, ids, [30, 1, 2, 33, 1, 1, 1, 1]), expected) < TOLERANCE
    assert relative_error(in_pieces(model, ids[:, :20], [1] * 20), expected[:, :20]) < TOLERANCE


@torch.no_grad()
def test_prefill_fills_the_same_state_as_decoding():
    model = small_model()
    ids = tokens(2, 65)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    in_pieces(model, ids, [65], cache=caches[0])
    in_pieces(model, ids, [1] * 65, cache=caches[1])
    for prefilled, decoded in zip(caches[0].layers, caches[1].layers):
        assert prefilled.get_seq_length() == decoded.get_seq_length() == 65
        for number in (0, 1):
            assert relative_error(decoded.recurrent_states[number], prefilled.recurrent_states[number]) < TOLERANCE
        for number in (0, 1, 2):
            torch.testing.assert_close(decoded.conv_states[number], prefilled.conv_states[number])


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 4])
def test_the_window_holds_with_a_cache_that_forgets_nothing(window):
    model = small_model("attention", window_size=window)
    ids = tokens(2, 14)
    expected = model(ids, use_cache=False).logits
    for sizes in ([6] + [1] * 8, [6, 3, 1, 4], [1] * 14):
        cache = DynamicCache()
        assert relative_error(in_pieces(model, ids, sizes, cache=cache), expected) < TOLERANCE
        assert cache.get_seq_length() == 14


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "mamba2"])
def test_weights_of_convolutions_may_have_strides(name):
    """As weights have that were transposed by a view when they were converted."""
    model = small_model(name, **({} if name == "mamba2" else {"conv_bias": True}))
    for layer in model.modules():
        if isinstance(layer, ShortConvolution):
            weight, bias = layer.weight[:, 0].T.contiguous(), torch.randn(layer.channels, 2)
            layer.weight, layer.bias = torch.nn.Parameter(weight.T.unsqueeze(1)), torch.nn.Parameter(bias[:, 0])
    ids = tokens(2, 12)
    expected = model(ids, use_cache=False).logits
    assert relative_error(in_pieces(model, ids, [6] + [1] * 6), expected) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------- padding


def padded_batch(ids, lengths, side):
    """Rows of different lengths, padded with a token that would do harm if anyone looked at it; and the mask."""
    width = max(lengths)
    batch, mask = torch.full((len(lengths), width), 7), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        batch[row, place], mask[row, place] = ids[row, :length], 1
    return batch, mask


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_each_row_of_a_padded_batch_equals_that_row_alone(name, side):
    model = small_model(name)
    lengths = [13, 1, 30, 4]
    ids = tokens(4, 30)
    batch, mask = padded_batch(ids, lengths, side)
    logits = model(batch, attention_mask=mask).logits
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length]).logits
        assert relative_error(logits[row][mask[row].bool()], alone[0]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_left_padded_batch_stay_right_through_chunked_prefill_and_decoding(name):
    model = small_model(name)
    lengths = [12, 1, 29]  # with pieces of 10, some rows have no token at all in the first pieces
    ids = tokens(3, 40)
    batch, mask = padded_batch(ids, lengths, "left")
    batch, mask = torch.cat([batch, ids[:, -6:]], 1), torch.cat([mask, torch.ones(3, 6, dtype=torch.long)], 1)
    logits = in_pieces(model, batch, [10, 10, 9, 1, 1, 3, 1], mask)
    for row, length in enumerate(lengths):
        alone = model(torch.cat([ids[row : row + 1, :length], ids[row : row + 1, -6:]], 1)).logits
        assert relative_error(logits[row, -length - 6 :], alone[0]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_a_masked_single_token_touches_neither_state_nor_convolution(name):
    """Continuing right-padded prompts: in the second call only row 0 has a token, in the third both."""
    model = small_model(name)
    ids = tokens(2, 8)
    cache = DynamicCache(config=model.config)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5] = 0
    model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache, use_cache=True)
    model(ids[:, 5:6], attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)
    last = model(ids[:, 6:7], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    assert relative_error(last[0, 0], model(ids[:1, :7]).logits[0, -1]) < TOLERANCE
    kept = torch.cat([ids[1:, :5], ids[1:, 6:7]], dim=1)
    assert relative_error(last[1, 0], model(kept).logits[0, -1]) < TOLERANCE


@torch.no_grad()
def test_a_batch_of_one_with_padding_equals_the_row_alone():
    model = small_model()
    ids = tokens(1, 20)
    batch, mask = torch.cat([torch.full((1, 9), 3), ids], 1), torch.tensor([[0] * 9 + [1] * 20])
    assert relative_error(model(batch, attention_mask=mask).logits[:, 9:], model(ids).logits) < TOLERANCE


@torch.no_grad()
def test_a_row_without_any_token_disturbs_nobody():
    model = small_model()
    ids = tokens(2, 9)
    mask = torch.tensor([[1] * 9, [0] * 9])
    assert relative_error(model(ids, attention_mask=mask).logits[:1], model(ids[:1]).logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_a_piece_in_which_no_row_has_a_token_changes_nothing(name):
    model = small_model(name)
    ids = tokens(2, 6)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    found = in_pieces(model, ids, [3, 2, 1], mask)[:, 3:]
    assert relative_error(found, model(ids[:, 3:]).logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_right_padding_without_a_mask_changes_no_earlier_logit(name):
    """How lm-eval calls a model: longer rows decide the width, nobody passes a mask."""
    model = small_model(name)
    ids = tokens(2, 40)
    ids[1, 25:] = 0
    assert relative_error(model(ids).logits[1, :25], model(ids[1:, :25]).logits[0]) < TOLERANCE


# -------------------------------------------------------------------------------------------------------- causality


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", [1, 63, 64, 90])
def test_perturbing_a_future_token_changes_no_earlier_logit(name, place):
    model = small_model(name)
    ids = tokens(1, 100)
    other = ids.clone()
    other[0, place] = (ids[0, place] + 1) % model.config.vocab_size
    before, after = model(ids).logits, model(other).logits
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place:], after[:, place:])


# ------------------------------------------------------------------------------------------------- the cache itself


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid"])
def test_generation_continues_from_a_saved_cache(name):
    model = small_model(name)
    ids = tokens(2, 30)
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache, use_cache=True)
    file = io.BytesIO()
    torch.save(cache, file)
    copied = copy.deepcopy(cache)
    expected = model(ids).logits[:, 20:]
    in_pieces(model, ids[:, 20:], [10], cache=cache)  # using the first cache up leaves the others alone
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert relative_error(in_pieces(model, ids[:, 20:], [4, 6], cache=other), expected) < TOLERANCE


def test_a_given_cache_is_used_whatever_else_is_asked():
    """Also with use_cache=False, in training mode, and when gradients are recorded."""
    model = small_model("hybrid")
    ids = tokens(1, 12)
    expected = model(ids).logits[:, 8:]
    for arguments in ({}, {"use_cache": False}, {"use_cache": True}):
        for training in (False, True):
            cache = DynamicCache(config=model.config)
            model.train(training)(ids[:, :8], past_key_values=cache)
            pieces = [model(piece, past_key_values=cache, **arguments).logits for piece in (ids[:, 8:11], ids[:, 11:])]
            assert relative_error(torch.cat(pieces, 1), expected) < TOLERANCE
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(ids, past_key_values=cache)


@torch.no_grad()
def test_memory_per_sequence_is_constant():
    model = small_model()
    cache = DynamicCache(config=model.config)

    def held_bytes():
        layers = [(*layer.conv_states.values(), *layer.recurrent_states.values()) for layer in cache.layers]
        return sum(x.untyped_storage().nbytes() for states in layers for x in states if x is not None)

    model(tokens(1, 3), past_key_values=cache, use_cache=True)
    first = held_bytes()
    for length in (1, 100, 1):
        model(tokens(1, length), past_key_values=cache, use_cache=True)
        assert held_bytes() == first


@torch.no_grad()
def test_cropping_is_refused_and_says_what_to_do():
    model = small_model()
    cache = DynamicCache(config=model.config)
    model(tokens(1, 5), past_key_values=cache, use_cache=True)
    cache.crop(0)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"copy\.deepcopy"):
        cache.crop(-2)


@torch.no_grad()
@pytest.mark.parametrize("attention", [0, 2])
def test_after_a_refused_crop_a_cache_is_whole_or_refused(attention):
    model = small_model(num_hidden_layers=3, attn={"layers": [attention], "num_heads": 4})
    ids = tokens(1, 15)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="they have been shortened: discard the cache"):
        cache.crop(-5)
    if attention == 0:
        with pytest.raises(ValueError, match=r"cannot be continued: its layers hold \[7, 12, 12\] columns"):
            model(ids[:, 12:], past_key_values=cache)
    else:
        found = model(ids[:, 12:], past_key_values=cache).logits
        assert relative_error(found, model(ids).logits[:, 12:]) < TOLERANCE


class Interrupts:
    """A forward hook on ``module`` that raises once."""

    def __init__(self, module, error):
        self.error, self.handle = error, module.register_forward_hook(self)

    def __call__(self, *_):
        self.handle.remove()
        raise self.error


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize("new_columns", [1, 3])
@pytest.mark.parametrize("name", ["momentum_deltanet", "rwkv7", "hybrid", "attention"])
def test_the_cache_of_an_interrupted_call_is_refused(name, new_columns, error):
    """Interrupted when the first layer has read the tokens, or when all have."""
    model, ids = small_model(name), tokens(2, 12)
    layers, more = model.model.layers, ids[:, 8 : 8 + new_columns]
    expected = model(ids[:, : 8 + new_columns]).logits[:, 8:]
    for place in (layers[0], layers[-1].attn, model.model.norm):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        kept = copy.deepcopy(cache)
        Interrupts(place, error)
        with pytest.raises(type(error)):
            model(more, past_key_values=cache)
        for refused in (cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match="a call that used it was interrupted"):
                model(more, past_key_values=refused)
        assert relative_error(model(more, past_key_values=kept).logits, expected) < TOLERANCE
        cache.reset()
        model(ids[:, :8], past_key_values=cache)
        assert relative_error(model(more, past_key_values=cache).logits, expected) < TOLERANCE


@torch.no_grad()
def test_what_is_refused_before_the_layers_run_leaves_the_cache_whole():
    model, ids = small_model(), tokens(1, 12)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    with pytest.raises(IndexError, match="input_ids must lie in"):
        model(ids[:, 8:] + 1000, past_key_values=cache)
    assert relative_error(model(ids[:, 8:], past_key_values=cache).logits, model(ids).logits[:, 8:]) < TOLERANCE
    empty = DynamicCache(config=model.config)
    Interrupts(model.model.layers[0].attn_norm, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=empty)
    assert relative_error(model(ids, past_key_values=empty).logits, model(ids).logits) < TOLERANCE


def wrong_batch(embeddings):
    return embeddings[:1]


def wrong_width(embeddings):
    return embeddings[..., :-1]


def wrong_dtype(embeddings):
    return embeddings.double()


@torch.no_grad()
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (wrong_batch, "past_key_values holds 2 sequences in layer 0, but this call has 1"),
        (wrong_width, r"inputs_embeds must have shape \[B, T, D\] with D = 32, got \[2, ., 31\]"),
        (wrong_dtype, "inputs_embeds must be torch.float32, as the model is, got torch.float64"),
    ],
)
@pytest.mark.parametrize("new_columns", [1, 3])
@pytest.mark.parametrize("name", ["momentum_deltanet", "linear_attn", "rwkv7", "hybrid", "attention"])
def test_after_a_call_with_wrong_arguments_the_right_ones_continue_the_cache(name, new_columns, wrong, message):
    model, ids = small_model(name), tokens(2, 12)
    more = ids[:, 8 : 8 + new_columns]
    embeddings = model.get_input_embeddings()(more)
    kept, cache = (model(ids[:, :8], use_cache=True).past_key_values for _ in range(2))
    expected = model(more, past_key_values=kept).logits
    given = [{"inputs_embeds": wrong(embeddings)}, *([{"input_ids": more[:1]}] if wrong is wrong_batch else [])]
    for arguments in given:
        with pytest.raises(ValueError, match=message):
            model(**arguments, past_key_values=cache)
    assert torch.equal(model(inputs_embeds=embeddings, past_key_values=cache).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("converts", ["autocast", "packed weights"])
def test_embeddings_that_the_layers_convert_are_not_refused(converts, dtype):
    model, ids = small_model(), tokens(2, 12)
    if converts == "packed weights":
        model.quantize("int8")
    with torch.autocast("cpu", torch.bfloat16, enabled=converts == "autocast"):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        kept = copy.deepcopy(cache)
        embeddings = model.get_input_embeddings()(ids[:, 8:9])
        found = model(inputs_embeds=embeddings.to(dtype), past_key_values=cache).logits
        assert relative_error(found, model(ids[:, 8:9], past_key_values=kept).logits) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", ["momentum_deltanet", "hybrid", "attention"])
def test_a_shallow_copy_of_the_cache_of_an_interrupted_call_is_refused(name):
    model, ids = small_model(name), tokens(1, 12)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    same_layers = copy.copy(cache)
    Interrupts(model.model.norm, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 8:9], past_key_values=cache)
    for refused in (same_layers, cache, copy.copy(cache)):
        with pytest.raises(ValueError, match="a call that used it was interrupted"):
            model(ids[:, 8:9], past_key_values=refused)


@torch.no_grad()
def test_a_cache_that_got_its_layers_in_an_interrupted_call_is_refused_until_it_is_reset():
    """All layers that are there have seen the same tokens, but the others are missing."""
    model, ids = small_model("attention"), tokens(1, 12)
    cache = DynamicCache()
    Interrupts(model.model.layers[0], KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, :8], past_key_values=cache)
    with pytest.raises(ValueError, match="a call that used it was interrupted"):
        model(ids[:, :8], past_key_values=cache)
    fresh = DynamicCache()
    model(ids[:, :8], past_key_values=fresh)
    expected = model(ids).logits[:, 8:]
    assert relative_error(model(ids[:, 8:], past_key_values=fresh).logits, expected) < TOLERANCE


@torch.no_grad()
def test_a_compiled_model_refuses_the_cache_of_an_interrupted_call():
    model, ids = small_model(), tokens(1, 12)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(ids[:, 8:9], past_key_values=cache, all_tokens_valid=True)
    Interrupts(model.model.norm, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 9:10], past_key_values=cache)
    with pytest.raises(ValueError, match="a call that used it was interrupted"):
        compiled(ids[:, 9:10], past_key_values=cache, all_tokens_valid=True)


@torch.no_grad()
def test_a_reset_cache_starts_over():
    model = small_model()
    ids = tokens(1, 12)
    cache = DynamicCache(config=model.config)
    model(tokens(1, 7, seed=5), past_key_values=cache, use_cache=True)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert relative_error(in_pieces(model, ids, [6, 6], cache=cache), model(ids).logits) < TOLERANCE


@torch.no_grad()
def test_rows_of_a_cache_can_be_selected_and_repeated():
    model = small_model()
    ids = tokens(3, 12)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache, use_cache=True)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    order = torch.tensor([2, 2, 0, 0])
    assert relative_error(in_pieces(model, ids[order, 8:], [3, 1], cache=cache), expected[order, 8:]) < TOLERANCE


def test_bad_masks_and_positions_are_refused_by_name():
    model, hybrid, ids = small_model(), small_model("hybrid"), tokens(2, 6)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6))
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, position_ids=torch.arange(5)[None])
    with pytest.raises(ValueError, match="input_ids and inputs_embeds"):
        model()
    cache = hybrid(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="6 cached and 6 new columns"):
        hybrid(ids, attention_mask=torch.ones(2, 6), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)

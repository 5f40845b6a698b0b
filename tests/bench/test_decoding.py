"""`mdn bench decode`: equal sizes, caches made to measure, and what a decoding step costs as the context grows."""

import pytest
import torch

from mdn.bench import decoding_weights
from mdn.bench.decoding import DecodingSize, bench, cache_bytes, filled_cache, growth
from mdn.cli import main
from mdn.layers import MIXERS
from mdn.models import MomentumDeltaNetForCausalLM
from mdn.models.info import load_config, model_facts
from mdn.training.build import count_parameters

TINY = DecodingSize(hidden_size=32, layers=2, heads=2, vocab_size=50)


def tiny_model(mixer):
    torch.manual_seed(0)
    return MomentumDeltaNetForCausalLM(TINY.configs([mixer])[mixer]).eval()


def test_all_mixers_are_compared_at_equal_size():
    counts = {mixer: count_parameters(config) for mixer, config in DecodingSize().configs(list(MIXERS)).items()}
    reference = counts["momentum_deltanet"]
    assert all(abs(count - reference) < 0.005 * reference for count in counts.values()), counts


@pytest.mark.parametrize("mixer", ["momentum_deltanet", "attention"])
def test_a_made_cache_is_as_large_as_a_decoded_one(mixer):
    model = tiny_model(mixer)
    with torch.no_grad():
        real = model(input_ids=torch.randint(50, (2, 100)), use_cache=True).past_key_values
    made = filled_cache(model, 2, 100)
    assert cache_bytes(made) == cache_bytes(real)
    assert made.get_seq_length() == real.get_seq_length() == 100


def test_memory_is_flat_for_mdn_and_grows_with_context_for_attention():
    found = bench(["momentum_deltanet", "attention"], [128, 512], [1, 2], TINY, repeats=2, seconds=2)
    memory = {(r["mixer"], r["batch"], r["context"]): r["bytes per sequence"] for r in found["rows"]}
    assert memory["momentum_deltanet", 1, 128] == memory["momentum_deltanet", 2, 512]
    assert memory["attention", 1, 512] == 4 * memory["attention", 1, 128] == 512 * 2 * 2 * 32 * 4
    assert all(r["ratio to MDN"] == 1 for r in found["rows"] if r["mixer"] == "momentum_deltanet")
    assert growth(found["rows"], "attention", 1) > 0


def work_of_a_step(mixer, context):
    """Operations of one decoding step by the cost model, and bytes of cache that it reads."""
    model = tiny_model(mixer)
    return model_facts(model.config, context).forward_flops_per_token, cache_bytes(filled_cache(model, 1, context))


def test_a_decoding_step_does_the_same_work_at_every_context_with_mdn_and_more_and_more_with_attention():
    assert work_of_a_step("momentum_deltanet", 4096) == work_of_a_step("momentum_deltanet", 128)
    (few, small), (many, large) = (work_of_a_step("attention", context) for context in (128, 4096))
    assert many > 5 * few
    assert large > 30 * small


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixers", "transformer"], "--mixers has unknown names"),
        (["--contexts", "128,long"], "--contexts must be positive"),
        (["--hidden-size", "10", "--heads", "3"], "--hidden-size must be a multiple of --heads"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, message, capsys):
    assert main(["bench", "decode", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_packed_weights_are_compared_with_float32_in_one_run():
    config = load_config("mdn_tiny")
    content = decoding_weights.bench(config, ["int8"], [1, 2], repeats=1, seconds=0.01, llama=False)
    assert {(row["format"], row["batch"]) for row in content["rows"]} == {
        (name, batch) for name in ("float32", "int8", decoding_weights.IN_TORCH) for batch in (1, 2)
    }
    assert all(row["ratio"] == 1 for row in content["rows"] if row["format"] == "float32")
    (table,) = decoding_weights.tables(content)
    assert len(table.rows) == 3

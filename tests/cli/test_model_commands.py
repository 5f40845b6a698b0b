"""`mdn info` and `mdn generate`, as a user runs them (inside this process)."""

import functools
import io
import json
import string

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mdn.analysis.recording import load_model_and_tokens
from mdn.cli import main
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from small_models import AUTHORS_400M, small_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A small model over single letters, with its tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    letters = [*string.ascii_lowercase, " ", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>")
    fast.save_pretrained(directory)
    small_model("hybrid", vocab_size=len(letters)).save_pretrained(directory)
    return directory


def complete(capsys, directory, *arguments):
    assert main(["generate", str(directory), *arguments]) == 0
    return capsys.readouterr().out


def test_generate_prints_the_prompt_and_its_continuation(model_directory, capsys, tmp_path):
    file = tmp_path / "result.json"
    printed = complete(capsys, model_directory, "--prompt", "hello", "--max-new-tokens", "8", "--json", str(file))
    result = json.loads(file.read_text())
    assert printed == f"hello{result['completion']}\n"
    assert 1 <= result["new_tokens"] <= 8
    assert len(result["completion"]) >= result["new_tokens"] - 1


def test_prompts_of_the_authors_checkpoints_begin_with_end_of_text(tmp_path, monkeypatch):
    """Their configs have a bos_token_id of 1, which training with GPT-2's tokenizer has never used."""
    ids = {letter: i for i, letter in enumerate(string.ascii_lowercase)} | {"<|endoftext|>": 50256}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end).save_pretrained(tmp_path)
    config = {**AUTHORS_400M, "hidden_size": 32, "head_dim": 8, "num_heads": 2, "num_hidden_layers": 1}
    model = MomentumDeltaNetForCausalLM(MomentumDeltaNetConfig(**config))
    assert model.generation_config.bos_token_id == 1
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("hello")
    read = []
    monkeypatch.setattr(MomentumDeltaNetForCausalLM, "generate", lambda _, ids, **__: read.append(ids[0]) or ids)
    assert main(["generate", str(tmp_path), "--prompt", "hello"]) == 0
    options = ["--lengths", "400", "--keys", "1", "--depths", "1", "--examples", "1", "--out", str(tmp_path / "out")]
    assert main(["needle", "--model", str(tmp_path), *options]) == 0
    read.append(load_model_and_tokens(str(tmp_path), tmp_path / "text.txt", 4)[1][0])
    assert [row[0].item() for row in read] == [50256] * 3


def test_generate_is_repeatable_and_greedy_at_temperature_zero(model_directory, capsys):
    arguments = ("--prompt", "abc", "--max-new-tokens", "12", "--ignore-eos")
    sampled = [complete(capsys, model_directory, *arguments, "--seed", seed) for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    greedy = complete(capsys, model_directory, *arguments, "--temperature", "0")
    chunked = complete(capsys, model_directory, *arguments, "--temperature", "0", "--prefill-chunk", "2")
    assert greedy == chunked
    beams = [complete(capsys, model_directory, *arguments, "--beams", "3", *more) for more in ((), ("--top-k", "0"))]
    assert beams[0] == beams[1]
    assert beams[0].startswith("abc")


def test_generate_streams_the_text_while_it_is_made(model_directory, monkeypatch):
    screen = io.StringIO()
    seen_at_each_token = []
    prepare = MomentumDeltaNetForCausalLM.prepare_inputs_for_generation

    @functools.wraps(prepare)  # generate() reads the signature
    def watched(self, *arguments, **named):
        seen_at_each_token.append(len(screen.getvalue()))
        return prepare(self, *arguments, **named)

    monkeypatch.setattr(MomentumDeltaNetForCausalLM, "prepare_inputs_for_generation", watched)
    monkeypatch.setattr("sys.stdout", screen)
    assert main(["generate", str(model_directory), "--prompt", "a b", "--max-new-tokens", "200", "--ignore-eos"]) == 0
    assert seen_at_each_token[0] == len("a b")
    assert seen_at_each_token[-1] > len("a b")  # words appear as soon as the space after them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "runs/nothing-here", "--prompt", "a"], "neither a model directory, a run folder nor a Hub id"),
        (["generate", "MODEL", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "MODEL", "--prompt", "a", "--top-p", "2"], "--top-p"),
        (["generate", "MODEL", "--prompt", "", "--no-start-token"], "--prompt is empty and --no-start-token is given"),
        (
            ["generate", "MODEL", "--prompt", "a", "--beams", "2", "--temperature", "1.5"],
            "--temperature cannot be combined with --beams 2: beam search does not sample",
        ),
        (["generate", "MODEL", "--prompt", "a", "--beams", "2", "--top-k", "3"], "--top-k cannot be combined"),
        (["generate", "MODEL", "--prompt", "a", "--beams", "2", "--top-p", "0.5"], "--top-p cannot be combined"),
        (["info", "mdn_4M"], "shipped ones are"),
        (["info", "mdn_tiny", "--context", "0"], "--context"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(arguments, message, model_directory, capsys):
    arguments = [str(model_directory) if word == "MODEL" else word for word in arguments]
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mdn: error:")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_directory_without_a_model_is_refused(tmp_path, capsys):
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_info_prints_what_it_writes(capsys, tmp_path):
    file = tmp_path / "facts.json"
    assert main(["info", "mdn_h_3to1_400M", "--context", "100", "--json", str(file)]) == 0
    printed, facts = capsys.readouterr().out, json.loads(file.read_text())
    assert f"{facts['total_parameters']:,}" in printed
    assert f"{facts['forward_flops_per_token']:,}" in printed
    assert "18 x momentum_deltanet, 6 x attention" in printed
    assert facts["state_bytes"]["keys and values"] == 6 * 2 * 1024 * 2 * 100
    assert facts["state_bytes_per_token"] == 6 * 2 * 1024 * 2
    assert facts["state_bytes"]["S"] == facts["state_bytes"]["M"] == 18 * 8 * 128 * 128 * 4


def test_info_reads_model_directories_too(model_directory, capsys):
    assert main(["info", str(model_directory)]) == 0
    assert "1 x momentum_deltanet, 1 x attention" in capsys.readouterr().out


def test_quantize_writes_a_model_that_generates_like_the_original_packed_at_loading(model_directory, capsys, tmp_path):
    target, arguments = tmp_path / "packed", ("--prompt", "abc", "--max-new-tokens", "12", "--temperature", "0")
    assert main(["quantize", str(model_directory), str(target), "--weights", "int4"]) == 0
    assert "int4 weights" in capsys.readouterr().out
    assert complete(capsys, target, *arguments) == complete(capsys, model_directory, *arguments, "--weights", "int4")
    assert complete(capsys, target, *arguments, "--weights", "int4") == complete(capsys, target, *arguments)
    assert main(["info", str(target)]) == 0
    capsys.readouterr()
    assert main(["quantize", str(model_directory), str(target)]) == 2
    assert "is not an empty directory" in capsys.readouterr().err
    assert main(["generate", str(target), "--prompt", "a", "--weights", "int8"]) == 2
    assert "the weights are int4 already" in capsys.readouterr().err

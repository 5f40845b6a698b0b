"""What users type wrong, and files that are broken: every case is one line that names the input, and exit code 2."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval_support import make_model, make_tokenizer
from mdn.cli import EXTRAS, main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad-input") / "model"
    make_model().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The error line of a command that must end with exit code 2 and nothing else on stderr."""
    code = main([str(argument) for argument in arguments])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2, lines
    errors = [line for line in lines if line.startswith("mdn: error: ")]
    assert len(errors) == 1, lines
    assert not any("Traceback" in line for line in lines)
    return errors[0]


# ---- weights and configs that are not what they should be


def rewrite_config(**changes: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(content | changes))

    return damage


def replace_config(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.json").write_text(text) and None


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def empty_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def pickled_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"__reduce__": print}))


def index_without_metadata(directory: Path) -> None:
    names = list(load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "metadata": None}))


def set_nan(weights: dict[str, torch.Tensor]) -> None:
    next(value for name, value in weights.items() if "embeddings" in name)[3] = torch.nan


def drop_one(weights: dict[str, torch.Tensor]) -> None:
    weights.pop(next(name for name in weights if "q_proj" in name))


BROKEN_MODELS: dict[str, Callable[[Path], None]] = {
    "truncated weights": cut_weights,
    "empty weights": empty_weights,
    "pickled weights": pickled_weights,
    "NaN in the weights": change_weights(set_nan),
    "a tensor is missing": change_weights(drop_one),
    "index with metadata null": index_without_metadata,
    "config and weights do not fit": rewrite_config(hidden_size=48),
    "config.json is null": replace_config("null"),
    "config.json is a list": replace_config("[]"),
    "config.json is cut": replace_config('{"model_type": "mom'),
    "config.json is nested deeply": replace_config("[" * 100_000),
    "unknown dtype": rewrite_config(dtype="float99"),
    "vocabulary of 2^62": rewrite_config(vocab_size=2**62),
    "attention layers as words": rewrite_config(attn={"layers": ["first"], "num_heads": 2}),
    "unknown mixer": rewrite_config(mixer="no_such_mixer"),
    "no model type": replace_config("{}"),
}


@pytest.mark.parametrize("kind", BROKEN_MODELS)
def test_a_broken_model_directory_is_named(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(model, directory)
    BROKEN_MODELS[kind](directory)
    assert str(directory) in refused(capsys, "generate", directory, "--prompt", "abc", "--max-new-tokens", "2")


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "MODEL", "--tasks", "arc_easy", "--out", "OUT"),
        ("needle", "--model", "MODEL", "--out", "OUT"),
        ("analyze", "state-norm", "MODEL", "--text", __file__),
        ("analyze", "spectra", "--model", "MODEL", "--text", __file__),
        ("convert", "MODEL", "OUT"),
        ("quantize", "MODEL", "OUT"),
    ],
)
def test_every_command_names_a_truncated_model(
    command: tuple[str, ...], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(model, directory)
    cut_weights(directory)
    places = {"MODEL": directory, "OUT": tmp_path / "out"}
    assert str(directory) in refused(capsys, *(places.get(word, word) for word in command))


@pytest.mark.parametrize(
    "damage", [cut_weights, empty_weights, change_weights(drop_one), rewrite_config(weight_format="int4")]
)
def test_a_broken_packed_model_is_named(
    damage: Callable[[Path], None], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "packed"
    assert main(["quantize", str(model), str(directory), "--weights", "int8"]) == 0
    capsys.readouterr()
    damage(directory)
    assert str(directory) in refused(capsys, "generate", directory, "--prompt", "abc", "--max-new-tokens", "2")


def test_an_interrupted_quantize_leaves_nothing_behind(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", interrupted)
        assert main(["quantize", str(model), str(tmp_path / "packed")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "mdn: interrupted"
    assert main(["quantize", str(model), str(tmp_path / "packed")]) == 0


# ---- words on the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "MODEL", "--prompt", "a", "--device", "cuda"), "device 'cuda' cannot be used here"),
        (("generate", "MODEL", "--prompt", "a", "--device", "nope"), "device 'nope' cannot be used here"),
        (("generate", "MODEL", "--prompt", "a", "--device", ""), "device '' cannot be used here"),
        (("generate", "MODEL", "--prompt", "a", "--device", "meta"), "device 'meta' cannot be used here"),
        (("generate", "MODEL", "--prompt", "\udce9"), "--prompt is not UTF-8 text"),
        (("generate", "MODEL", "--prompt", "a", "--temperature", "nan"), "--temperature must be at least 0"),
        (("generate", "MODEL", "--prompt", "a", "--temperature", "1e-320"), "--temperature must be 0 or at least 1e-6"),
        (("generate", "MODEL", "--prompt", "a", "--top-p", "inf"), "--top-p must be above 0 and at most 1"),
        (("generate", "MODEL", "--prompt", "a", "--seed", "9" * 30), "--seed must be at most 4294967295"),
        (("generate", "MODEL", "--prompt", "a", "--max-new-tokens", "9" * 30), "--max-new-tokens must be at most"),
        (
            ("generate", "MODEL", "--prompt", "a", "--json", f"{__file__}/x"),
            "--json cannot be written",
        ),
        (("generate", "MODEL", "--prompt", "a", "--json", "OUT"), "--json must be a file, got a directory"),
        (("eval", "MODEL", "--tasks", "arc_easy", "--device", "cuda"), "device 'cuda' cannot be used here"),
        (("eval", "MODEL", "--suite", "needle", "--lengths", "a"), "--lengths must be positive whole numbers"),
        (("eval", "MODEL", "--tasks", "arc_easy", "--out", __file__), "--out must be a directory, got a file"),
        (("quantize", "MODEL", "OUT/packed", "--weights", "int3"), "--weights invalid choice: 'int3'"),
        (("quantize", "MODEL", __file__), "target: must be a directory, got a file"),
        (("quantize", "OUT/nothing", "OUT/packed"), "nothing' is neither a model directory"),
        (("quantize", "MODEL"), "the following arguments are required: target"),
        (("bench", "decode", "--weights", "int3"), "--weights has unknown formats ['int3']"),
        (("bench", "decode", "--weights", "int8", "--model", "OUT/nothing"), "nothing"),
        (("bench", "decode", "--weights", "int8", "--batches", "0"), "--batches must be positive whole numbers"),
        (("bench", "decode", "--weights", "int8", "--plot", "OUT/x.png"), "--plot cannot be combined with --weights"),
        (("bench", "quality", "OUT"), "no config.json"),
        (("bench", "quality", "MODEL", "--weights", "int3"), "--weights has unknown formats ['int3']"),
        (("bench", "train", "--profile", "nothing"), "nothing"),
        (("needle", "--lengths", "a"), "--lengths must be positive whole numbers separated by commas, got 'a'"),
        (("needle", "--lengths", ""), "--lengths must be positive whole numbers"),
        (("needle", "--out", __file__), "--out must be a directory, got a file"),
        (("needle", "--learning-rate", "inf"), "--learning-rate must be above 0 and finite"),
        (("analyze", "stability", "--windows", "9" * 11), "--windows must be positive whole numbers"),
        (("analyze", "stability", "--heads", "9" * 20), "--heads must be at most"),
        (("analyze", "spectra", "--seed", "-1"), "--seed must be at least 0, got -1"),
        (("info", "mdn_tiny", "--context", "9" * 30), "--context must be at most"),
        (("info", "JSON:null"), "must hold a JSON object, got NoneType"),
        (("info", "JSON:" + "[" * 100_000), "its JSON is nested too deeply"),
        (("info", 'JSON:{"num_hidden_layers": 1000000}'), "num_hidden_layers must be"),
        (("info", 'JSON:{"conv_size": 10000000}'), "conv_size must be"),
        (("info", 'JSON:{"norm_eps": NaN}'), "norm_eps must be"),
        (("info", 'JSON:{"attn": {"layers": [0], "num_heads": -1}}'), "num_heads"),
        (("analyze", "stability", "--windows", "5000", "--steps", "16", "--heads", "2"), "--windows"),
        (("analyze", "stability", "--heads", "2000000000"), "--heads"),
        (("train", "demo", "model.hidden_size=99999999999", "output=OUT/run"), "hidden_size must be"),
        (("train", "demo", "model.hidden_size=1000000", "output=OUT/run"), "GB of memory"),
        (("train", "demo", "training.lr=1"), "unknown key 'training.lr' (did you mean training.learning_rate?)"),
        (("train", "demo", "training.steps=99999999999999999999"), "training.steps: input should be less than"),
        (("train", "demo", "training.learning_rate=inf"), "training.learning_rate: input should be a finite number"),
        (("train", "demo", "training.learning_rate=.nan"), "training.learning_rate: input should be"),
        (("train", "demo", "training.steps=2001-99-99"), "is not valid YAML: month must be in 1..12"),
        (("train", "demo", "training.steps=" + "[" * 5000), "nested too deeply"),
        (("train", "demo", "seed=99999999999"), "seed: input should be less than or equal to 4294967295"),
        (("train", "demo", "model.hidden_size=99999999999", "--dry-run"), "hidden_size"),
        (("train", "demo", "model.mixer=nothing", "--dry-run"), "nothing"),
        (("train", "demo", "plugins=[no_such_module]", "--dry-run"), "plugin 'no_such_module' cannot be imported"),
        (("train", "demo", "model.init_from=nowhere", "--dry-run"), "'nowhere' is neither a model directory"),
        (("train",), "give a recipe"),
        (("trian", "demo"), "invalid choice: 'trian'"),
        (("train", "demo", "--nonsense"), "unrecognized arguments: --nonsense; see `mdn train --help`"),
        (
            ("generate", "MODEL", "--prompt", "a", "--tokens", "3"),
            "unrecognized arguments: --tokens 3 (did you mean --max-new-tokens?); see `mdn generate --help`",
        ),
        (("bench", "op", "--fast"), "see `mdn bench op --help`"),
        (("mqar", "quick", "seeds=9"), "seeds"),
        (("mqar", "quick", "mixers=[no_such_mixer]"), "unknown mixer 'no_such_mixer'"),
        (("report", "OUT/nothing", "--out", "OUT/page.html"), "nothing"),
    ],
)
def test_a_wrong_word_is_named(
    arguments: tuple[str, ...], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("MODEL", str(model)).replace("OUT", str(tmp_path)) for word in arguments]
    for number, word in enumerate(words):
        if word.startswith("JSON:"):
            (tmp_path / "config.json").write_text(word.removeprefix("JSON:"))
            words[number] = str(tmp_path / "config.json")
    assert message in refused(capsys, *words)


def test_a_prompt_from_a_pipe_must_be_text_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    with file.open(encoding="utf-8") as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert "standard input is not UTF-8 text" in refused(capsys, "generate", model)


# ---- recipes

ALIAS_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize("command", ["train", "mqar"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ALIAS_BOMB, "has more than 100,000 entries when its aliases are written out"),
        ("a: &a [*a]\n", "nested too deeply"),
        ("[" * 20_000, "nested too deeply"),
        ("a: " + "[" * 60 + "]" * 60, "nested too deeply"),
        ("name: !!python/object/apply:os.system ['echo']", "is not valid YAML"),
        ("just text", "must be a mapping of blocks, got str"),
        ("", "must be a mapping of blocks, got NoneType"),
        ("name: [unclosed", "is not valid YAML"),
        ("seed: " + "9" * 5000, "is not valid YAML"),
    ],
)
def test_a_hostile_recipe_is_refused_at_once(
    command: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    error = refused(capsys, command, file)
    assert str(file) in error
    assert message in error


def test_a_recipe_that_is_not_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert f"{file} is not UTF-8 text" in refused(capsys, "train", file)


# ---- what is shown of other errors


def test_an_error_nobody_foresaw_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mdn.models.info.load_config", _fails)
    assert main(["info", "mdn_tiny"]) == 1
    assert capsys.readouterr().err == "mdn: error: KeyError: 'surprise' (set MDN_DEBUG=1 to see where)\n"


@pytest.mark.parametrize(("package", "extra"), [("lm_eval.api", "eval"), ("pydantic", "train"), ("pywt", "study")])
def test_a_missing_optional_package_comes_with_the_line_that_installs_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(args: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("mdn.cli.info.run", missing)
    assert main(["info", "mdn_tiny"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"needs the package {package.partition('.')[0]}, which is not installed" in message
    assert f"pip install 'momentum-deltanet[{extra}]', or pip install '.[{extra}]' in a clone" in message


def test_every_extra_that_is_advised_exists() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(EXTRAS.values()) <= project["project"]["optional-dependencies"].keys()


def test_mdn_debug_shows_where_an_error_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdn.models.info.load_config", _fails)
    monkeypatch.setitem(os.environ, "MDN_DEBUG", "1")
    with pytest.raises(KeyError, match="surprise"):
        main(["info", "mdn_tiny"])


def _fails(*_: Any) -> None:
    raise KeyError("surprise")


def test_too_little_memory_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("mdn.models.info.load_config", fails)
    assert "not enough memory for these sizes" in refused(capsys, "info", "mdn_tiny")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    import mdn

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"mdn {mdn.__version__}\n"

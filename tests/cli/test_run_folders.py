"""A run folder is a model everywhere; an unfinished one says what to do; what a run prints as next steps works."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch

from eval_support import make_tokenizer
from mdn.analysis.recording import load_model_and_tokens
from mdn.cli import main
from mdn.cli.train import next_commands
from mdn.models import MomentumDeltaNetForCausalLM
from mdn.training.recipe import load_recipe, to_yaml
from mdn.training.run import train
from training_support import tiny_recipe


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run-folders")
    train(tiny_recipe(root, training={"steps": 4}, logging={"gates_every": 2, "save_every": 2}))
    return root / "run"


@pytest.fixture(scope="module")
def unfinished(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("unfinished") / "run"
    shutil.copytree(run_folder, copy, ignore=shutil.ignore_patterns("model", "checkpoint-4", "summary.json"))
    return copy


COMMANDS = (
    "generate RUN --prompt abc --max-new-tokens 3",
    "info RUN",
    "eval RUN --tasks arc_easy --data DATA --limit 1 --max-length 64 --out OUT/eval",
    "needle --model RUN --lengths 600 --keys 1 --depths 1 --examples 1 --out OUT/needle",
    "analyze spectra --model RUN --text TEXT --points 10",
    "analyze state-norm RUN --text TEXT --tokens 8 --sequences 1",
    "convert RUN OUT/converted",
    "report RUN --out OUT/page.html",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_folder_is_a_model(command: str, run_folder: Path, tmp_path: Path) -> None:
    from eval_support import write_data

    write_data(tmp_path / "data")
    text = tmp_path / "text.txt"
    text.write_text("some words to read, more than enough of them for this. " * 4)
    places = {"RUN": run_folder, "OUT": tmp_path, "DATA": tmp_path / "data", "TEXT": text}
    for word, place in places.items():
        command = command.replace(word, str(place))
    assert main(command.split()) == 0


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("report")])
def test_an_unfinished_run_names_its_checkpoint_and_how_to_finish(
    command: str, unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("words")
    for word, place in {"RUN": unfinished, "OUT": tmp_path, "DATA": tmp_path, "TEXT": tmp_path / "text.txt"}.items():
        command = command.replace(word, str(place))
    assert main([*command.split(), *(["--skip-missing"] if command.startswith("eval") else [])]) == 2
    message = capsys.readouterr().err
    assert f"{unfinished} is an unfinished training run, stopped after step 2" in message
    assert f"`mdn train {unfinished}` finishes it" in message
    assert f"use {unfinished / 'checkpoint-2'} as it is" in message


def test_the_named_checkpoint_is_usable_and_the_named_command_finishes_the_run(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(unfinished / "checkpoint-2"), "--prompt", "a", "--max-new-tokens", "2"]) == 0
    copy = tmp_path / "run"
    shutil.copytree(unfinished, copy)
    assert main(["train", str(copy)]) == 0
    assert "(step 2)" in capsys.readouterr().err
    assert main(["generate", str(copy), "--prompt", "a", "--max-new-tokens", "2"]) == 0


def test_what_a_finished_run_prints_as_next_commands_works(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    assert main(["train", str(copy)]) == 0
    printed = capsys.readouterr().out
    commands = [line.split("    #")[0].strip() for line in printed.split("next:\n")[1].splitlines()]
    assert len(commands) == 4
    for command in commands:
        program, *words = shlex.split(command)
        assert Path(program).name == "mdn"
        assert main(words) == 0, command
    assert "lengthened from 4 to 8 steps" in capsys.readouterr().err


def test_a_run_stopped_while_data_is_prepared_does_not_claim_to_be_saved(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mdn.training.run.prepare_data", lambda recipe: os.kill(os.getpid(), signal.SIGINT))
    assert main(["train", str(run_folder / "recipe.yaml"), f"output={tmp_path / 'new'}"]) == 0
    printed = capsys.readouterr().out
    assert printed == "stopped before the first step; nothing was saved; to begin again, run the same command\n"
    shutil.copytree(run_folder, tmp_path / "copy")
    assert main(["train", str(tmp_path / "copy"), "training.steps=6"]) == 0
    printed = capsys.readouterr().out
    assert printed == "stopped before training went on; nothing new was saved; to go on, run the same command\n"


def test_an_unfinished_run_stopped_while_data_is_prepared_resumes_from_its_folder(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unfinished, copy)
    (copy / "recipe.yaml").write_text(to_yaml(load_recipe(copy)))
    monkeypatch.setattr("mdn.training.run.prepare_data", lambda recipe: os.kill(os.getpid(), signal.SIGINT))
    assert main(["train", str(copy)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"stopped at step 2; saved in {copy}; resume with: ")
    assert printed.endswith(f"mdn train {copy}\n")


def test_a_run_whose_recipe_counts_tokens_is_lengthened_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, training={"steps": None, "tokens": 256}, logging={"gates_every": 0})
    summary = train(recipe).summary
    assert summary is not None
    words = shlex.split(next_commands(summary, tmp_path / "run")[-1].split("    #")[0])[1:]
    assert main(words) == 0
    assert "lengthened from 2 to 4 steps" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["<s>", None])
def test_a_prompt_begins_with_the_token_that_training_texts_begin_with(
    start: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the tokenizer's own start token is another one, which training has never seen, or if it has none."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token = start
    tokenizer.save_pretrained(tmp_path / "own")
    settings = {"kind": "pretrained", "path": str(tmp_path / "own")}
    read: list[torch.Tensor] = []
    monkeypatch.setattr(MomentumDeltaNetForCausalLM, "generate", lambda _, ids, **__: read.append(ids) or ids)
    blocks = {"tokenizer": settings, "training": {"steps": 1}, "logging": {"gates_every": 0}, "sample": {"prompt": "a"}}
    train(tiny_recipe(tmp_path, **blocks))
    run, text = tmp_path / "run", tmp_path / "text.txt"
    assert read.pop().tolist() == [[tokenizer.eos_token_id, *b"a"]]
    text.write_text("abc")
    assert main(["generate", str(run), "--prompt", "abc"]) == 0
    _, recorded = load_model_and_tokens(str(run), text, 4)
    assert read.pop().tolist() == recorded.tolist() == [[tokenizer.eos_token_id, *b"abc"]]
    options = ["--lengths", "400", "--keys", "1", "--depths", "1", "--examples", "1", "--out", str(tmp_path / "out")]
    assert main(["needle", "--model", str(run), *options]) == 0
    assert read.pop()[0, :2].tolist() == [tokenizer.eos_token_id, ord("S")]


def test_nothing_but_the_text_is_printed_by_generate(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run_folder), "--prompt", "abc", "--max-new-tokens", "3"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("abc")
    assert len(shown.err.strip().splitlines()) == 1  # how many tokens in how many seconds


def test_files_of_a_run_are_readable_by_others(run_folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for folder in ("model", "checkpoint-4"):
        for path in (run_folder / folder).rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path


def test_eval_names_missing_files_before_it_loads_a_model(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("mdn.common.loading.load_model", load)
    arguments = ["eval", str(run_folder), "--suite", "perplexity", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "lambada_openai: no lambada_openai.jsonl or lambada_test.jsonl" in message
    assert "wikitext: no wikitext.jsonl" in message

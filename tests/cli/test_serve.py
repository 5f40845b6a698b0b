"""`mdn serve` where vLLM is not installed, and what it would start; tests/serving starts it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from eval_support import make_model
from mdn.cli import main
from mdn.cli.serve import add_arguments, server_arguments


@pytest.mark.parametrize("command", ["serve runs/demo", "bench serve"])
def test_without_vllm_one_line_says_how_to_install_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mdn.cli.serve.vllm_is_installed", lambda: False)
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mdn: error: mdn {command.split(' runs')[0]} needs vLLM: pip install")


def test_no_part_of_the_package_imports_the_plug_in() -> None:
    """Without vLLM it must cost nothing and break nothing."""
    code = "import mdn, mdn.layers, mdn.models, mdn.ops, mdn.cli, sys; print([m for m in sys.modules if 'vllm' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_vllm_finds_the_plug_in() -> None:
    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.value.startswith("mdn.")]
    assert point.load().__name__ == "register"  # loading it does not import vLLM


def test_arguments_that_the_server_refuses_are_one_line_and_argparse_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    (tmp_path / "stand_in_server.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mdn.cli.serve.SERVER", "stand_in_server")
    monkeypatch.setattr("mdn.cli.serve.vllm_is_installed", lambda: True)
    before = argparse.ArgumentParser.error, sys.argv
    assert main(["serve", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("mdn: error: --vllm: unrecognized arguments: --model")
    assert (argparse.ArgumentParser.error, sys.argv) == before


def arguments_for(*words: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return server_arguments(parser.parse_args(words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_server_gets_the_run_its_name_and_the_dtype_of_its_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    make_model().to(dtype).save_pretrained(run / "model")
    name = str(dtype).removeprefix("torch.")
    assert arguments_for(str(run)) == [
        *("--model", str(run / "model"), "--served-model-name", "demo", "--dtype", name),
        *("--host", "127.0.0.1", "--port", "8000"),
    ]


def test_what_the_user_says_comes_last(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    words = arguments_for(
        *(str(tmp_path), "--name", "mine", "--dtype", "bfloat16", "--max-model-len", "99"),
        "--vllm=--max-num-seqs 64 --api-key 'a key'",
    )
    assert words[2:6] == ["--served-model-name", "mine", "--dtype", "bfloat16"]
    assert words[-6:] == ["--max-model-len", "99", "--max-num-seqs", "64", "--api-key", "a key"]

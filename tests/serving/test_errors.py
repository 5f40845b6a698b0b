"""What cannot be served is one line of `mdn serve`, whether we or vLLM refuse it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 16, "intermediate_size": 64}
    MomentumDeltaNetForCausalLM(MomentumDeltaNetConfig(vocab_size=64, **fields)).save_pretrained(folder)
    return folder


def last_line(*words: str) -> str:
    """Of `mdn serve` with these words, which must end with exit code 2."""
    command = [sys.executable, "-m", "mdn", "serve", *words]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "usage" not in found.stderr
    return found.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--unknown-option 3", "mdn: error: --vllm: unrecognized arguments: --unknown-option"),
        ("--tensor-parallel-size 2", "mdn: error: Momentum DeltaNet models in vLLM: tensor_parallel_size=2"),
    ],
)
def test_a_refused_argument_of_vllm(arguments, reason, directory):
    assert last_line(str(directory), f"--vllm={arguments}").startswith(reason)


def test_a_model_with_packed_weights(directory, tmp_path):
    MomentumDeltaNetForCausalLM.from_pretrained(directory).quantize("int8").save_pretrained(tmp_path)
    assert "packed weights (int8) are for mdn generate" in last_line(str(tmp_path))


def test_a_port_that_is_in_use(directory):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert last_line(str(directory), "--port", port).startswith(f"mdn: error: --port {port} is in use")


def test_a_missing_directory(tmp_path):
    assert last_line(str(tmp_path / "nothing")).startswith("mdn: error: ")

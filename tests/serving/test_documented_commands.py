"""The commands of docs/serving.md, from a training run to a streamed answer, as a reader types them."""

from __future__ import annotations

import shlex
import subprocess

from mdn.cli import main
from pages import ROOT, fenced_blocks
from served_http import server
from training_support import write_corpus

TINY = (
    "data.source=files data.paths=[corpus] data.cache_dir=cache data.held_out=0.2 data.held_out_bytes=2000 "
    "tokenizer.vocab_size=300 model.hidden_size=32 model.num_heads=2 model.head_dim=8 model.num_hidden_layers=1 "
    "training.batch_tokens=128 training.micro_batch_tokens=64 training.sequence_length=32 training.steps=2 "
    "training.warmup_steps=1 sample.max_new_tokens=3 output=runs/demo"
)


def test_three_commands_lead_from_a_run_to_a_streamed_answer(tmp_path, monkeypatch):
    commands = next(text for _, text in fenced_blocks("docs/serving.md") if text.startswith("mdn train"))
    train, serve, ask = commands.replace("\\\n", " ").splitlines()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(train)[1:], *shlex.split(TINY)]) == 0
    words = shlex.split(serve)
    assert words[:2] == ["mdn", "serve"]
    port = words.index("--port")
    del words[port : port + 2]  # another server may listen there
    with server(words[2:], tmp_path) as started:
        question = ask.replace("http://127.0.0.1:8000", started.address)
        answer = subprocess.run(shlex.split(question), capture_output=True, text=True, timeout=120, check=True).stdout
    events = [line for line in answer.splitlines() if line.startswith("data: ")]
    assert len(events) > 3
    assert events[-1] == "data: [DONE]"

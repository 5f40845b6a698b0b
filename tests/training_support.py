"""A tiny run for the training tests: a few kilobytes of text, one small layer, a few steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mdn.training.recipe import Recipe, validate

WORDS = ("alpha", "beta", "gamma", "delta", "momentum", "state", "gate", "value", "key", "query", "token", "chunk")


def write_corpus(directory: Path, documents: int = 12, words: int = 120) -> Path:
    """Text files of random words, the same for the same arguments."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = random.Random(7)
    for number in range(documents):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (directory / f"{number:03d}.txt").write_text(text + "\n")
    return directory


def tiny_recipe(root: Path, name: str = "run", **overrides: Any) -> Recipe:
    """A recipe that trains in about a second; `overrides` are blocks whose entries replace those below."""
    content: dict[str, Any] = {
        "name": name,
        "output": str(root / name),
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 8, "intermediate_size": 32},
        "data": {
            "source": "files",
            "paths": [str(root / "corpus")],
            "cache_dir": str(root / "cache"),
            "held_out": 0.2,
            "held_out_bytes": 2000,
        },
        "tokenizer": {"kind": "bytes"},
        "training": {
            "batch_tokens": 128,
            "sequence_length": 32,
            "micro_batch_tokens": 64,
            "steps": 12,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
        },
        "logging": {"gates_every": 4, "save_every": 3, "tensorboard": False},
    }
    for block, entries in overrides.items():
        content[block] = {**content.get(block, {}), **entries} if isinstance(entries, dict) else entries
    if not (root / "corpus").exists():
        write_corpus(root / "corpus")
    return validate(content, name)


def losses(run_dir: Path) -> list[str]:
    """The loss of every step as hexadecimal: equal strings are equal bits."""
    from mdn.training.monitor import read_metrics

    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [float(line["loss"]).hex() for line in lines]

"""Train a tiny model to find needles, then look for them over length and depth. Minutes on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mdn.common.progress import progress
from mdn.evaluation.mqar.train import rate_at
from mdn.evaluation.needle.examples import Example, make_example
from mdn.evaluation.needle.words import Words, make_batch
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# The state of every mixer has the same size: 4 heads of 16 x 16 (Mamba2: 2 heads of 32 with a state of 16).
_MIXER_FIELDS: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 32, "mixer_options": {"state_size": 16, "expand": 1}}
}


@dataclass(frozen=True)
class TinySettings:
    """``keys`` needles in every text, one of them asked for (in training: all of them, one after the other)."""

    haystack: str = "noise"
    keys: int = 4
    train_lengths: tuple[int, ...] = (96, 128, 192)
    test_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    depths: tuple[float, ...] = DEPTHS
    examples: int = 40
    steps: int = 500
    batch_tokens: int = 3072
    learning_rate: float = 5e-3
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)


def build_tiny(mixer: str, words: Words, settings: TinySettings) -> MomentumDeltaNetForCausalLM:
    fields: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "expand_v": 1,
        "use_mlp": False,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(settings.seed)
    config = MomentumDeltaNetConfig(**{**fields, **_MIXER_FIELDS.get(mixer, {}), **settings.model, "mixer": mixer})
    return MomentumDeltaNetForCausalLM(config)


def vocabulary(settings: TinySettings) -> Words:
    return Words(documentation_words=1000 if settings.haystack == "documentation" else 0)


def examples_of(
    settings: TinySettings, words: Words, length: int, depths: list[float], source: random.Random
) -> list[Example]:
    options: dict[str, Any] = {"haystack": settings.haystack, "keys": settings.keys}
    return [make_example(length, depth, words.count, source, **options) for depth in depths]


def train_tiny(mixer: str, settings: TinySettings) -> tuple[MomentumDeltaNetForCausalLM, list[float]]:
    """The model and its losses. Lengths, depths, keys and hay are drawn afresh for every step."""
    words = vocabulary(settings)
    model = build_tiny(mixer, words, settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    source = random.Random(settings.seed)
    losses = []
    bar = progress(range(settings.steps), desc=mixer, unit="step")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate_at(step, settings.steps, 0.1)
        length = source.choice(settings.train_lengths)
        depths = [source.random() for _ in range(max(1, settings.batch_tokens // length))]
        inputs, labels = make_batch(words, examples_of(settings, words, length, depths, source), with_others=True)
        asked = labels != -100
        hidden = model.model(inputs, use_cache=False).last_hidden_state[asked]
        loss = F.cross_entropy(model.lm_head(hidden), labels[asked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return model.eval(), losses


@torch.no_grad()
def find_needles(model: Callable[..., Any], settings: TinySettings) -> np.ndarray:
    """[depths, lengths]: the share of needles found, the same texts for every model."""
    words = vocabulary(settings)
    found = np.zeros((len(settings.depths), len(settings.test_lengths)))
    for column, length in enumerate(settings.test_lengths):
        for row, depth in enumerate(settings.depths):
            source = random.Random(f"{length} {depth}")
            made = examples_of(settings, words, length, [depth] * settings.examples, source)
            pieces = [made[start : start + 8] for start in range(0, len(made), 8)]
            right = 0
            for piece in pieces:
                inputs, labels = make_batch(words, piece, with_others=False)
                logits = model(inputs, logits_to_keep=1).logits[:, -1]
                right += int((logits.argmax(-1) == labels[:, -1]).sum())
            found[row, column] = right / len(made)
    return found

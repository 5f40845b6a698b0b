"""Tiny models trained to find needles, then tested over length and depth. Minutes on a CPU.

Their vocabulary is closed: every word, number and mark of the generator is one token; words of the haystack that are
too rare are <unk>.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mdn.evaluation.needle import (
    INSTRUCTION,
    KEYS,
    NEEDLE,
    QUESTION,
    NeedleExample,
    documentation_sentences,
    make_example,
    noise_sentence,
    shortest_length,
)
from mdn.experiments.tiny_training import LabelledTokens, TinyOutcome, TinyTraining, train_tiny
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops.fused import IGNORE_INDEX

TRAIN_LENGTHS = (96, 128, 192)
BATCH_TOKENS = 3072
DOCUMENTATION_WORDS = 1000
# The state of every mixer has the same size: 4 heads of 16 x 16 (Mamba2: 2 heads of 32 with a state of 16).
_MIXER_FIELDS: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 32, "mixer_options": {"state_size": 16, "expand": 1}}
}
_TOKEN = re.compile(r"\w+|[^\w\s]")
PAD, UNKNOWN = 0, 1


@dataclass(frozen=True)
class NeedleSettings:
    """``keys`` needles in every text, one of them queried (in training: all of them, one after the other)."""

    haystack: str = "noise"
    keys: int = 4
    test_lengths: tuple[int, ...] = (128, 256, 512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    examples: int = 40
    steps: int = 500
    learning_rate: float = 5e-3
    seed: int = 0

    def vocabulary(self) -> Words:
        return Words(DOCUMENTATION_WORDS if self.haystack == "documentation" else 0)

    def check(self) -> None:
        """Refuses texts that are too short for their needles, before anything is trained."""
        shortest = shortest_length(self.vocabulary().count, self.keys)
        for name, lengths in (("keys", TRAIN_LENGTHS), ("lengths", self.test_lengths)):
            if min(lengths) < shortest:
                raise ValueError(
                    f"--{name}: {self.keys} needles, the instruction and the question need {shortest} tokens, "
                    f"but the shortest {'training' if name == 'keys' else 'test'} text has {min(lengths)}"
                )


class Words:
    """``documentation_words`` of the most frequent words of the documentation are known, beside all others."""

    def __init__(self, documentation_words: int = 0) -> None:
        source = random.Random(0)
        fixed = [INSTRUCTION, NEEDLE, QUESTION, " ".join(KEYS), " ".join(map(str, range(10, 100)))]
        texts = [*fixed, *(noise_sentence(source) for _ in range(2000))]
        known = dict.fromkeys(token for text in texts for token in _TOKEN.findall(text))
        if documentation_words:
            counts = Counter(token for text in documentation_sentences() for token in _TOKEN.findall(text))
            known.update(dict.fromkeys(token for token, _ in counts.most_common(documentation_words)))
        self.ids = {token: 2 + number for number, token in enumerate(known)}

    def __len__(self) -> int:
        return 2 + len(self.ids)

    def count(self, text: str) -> int:
        return len(_TOKEN.findall(text))

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(token, UNKNOWN) for token in _TOKEN.findall(text)]


def make_batch(words: Words, examples: list[NeedleExample], with_others: bool) -> LabelledTokens:
    """Tokens padded on the left; the label of a question's last token is the answer."""
    rows: list[tuple[list[int], list[int]]] = []
    for example in examples:
        ids = words.encode(example.prompt)
        labels = [IGNORE_INDEX] * (len(ids) - 1) + words.encode(example.answer)
        for question, answer in example.others if with_others else ():
            asked, expected = words.encode(question), words.encode(answer)
            ids += [*labels[-1:], *asked]
            labels += [IGNORE_INDEX] * len(asked) + expected
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids, _ in rows])
    return LabelledTokens(inputs, torch.tensor([[IGNORE_INDEX] * (longest - len(row)) + row for _, row in rows]))


def build_model(mixer: str, vocab_size: int, seed: int) -> MomentumDeltaNetForCausalLM:
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
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
    torch.manual_seed(seed)
    return MomentumDeltaNetForCausalLM(
        MomentumDeltaNetConfig(**{**fields, **_MIXER_FIELDS.get(mixer, {}), "mixer": mixer})
    )


def _examples(
    settings: NeedleSettings, words: Words, length: int, depths: list[float], source: random.Random
) -> list[NeedleExample]:
    options: dict[str, Any] = {"haystack": settings.haystack, "keys": settings.keys}
    return [make_example(length, depth, words.count, source, **options) for depth in depths]


def training_batches(settings: NeedleSettings, words: Words) -> Iterator[LabelledTokens]:
    """Lengths, depths, keys and hay are drawn afresh for every step."""
    source = random.Random(settings.seed)
    for _ in range(settings.steps):
        length = source.choice(TRAIN_LENGTHS)
        depths = [source.random() for _ in range(max(1, BATCH_TOKENS // length))]
        yield make_batch(words, _examples(settings, words, length, depths, source), with_others=True)


def train_finder(mixer: str, settings: NeedleSettings) -> tuple[MomentumDeltaNetForCausalLM, TinyOutcome]:
    words = settings.vocabulary()
    model = build_model(mixer, len(words), settings.seed)
    training = TinyTraining(settings.steps, settings.learning_rate)
    return model, train_tiny(model, training_batches(settings, words), training, label=mixer)


@torch.no_grad()
def find_needles(model: Callable[..., Any], settings: NeedleSettings) -> np.ndarray:
    """[depths, lengths]: the share of needles found, the same texts for every model."""
    words = settings.vocabulary()
    found = np.zeros((len(settings.depths), len(settings.test_lengths)))
    for column, length in enumerate(settings.test_lengths):
        for row, depth in enumerate(settings.depths):
            source = random.Random(f"{length} {depth}")
            made = _examples(settings, words, length, [depth] * settings.examples, source)
            pieces = [made[start : start + 8] for start in range(0, len(made), 8)]
            right = 0
            for piece in pieces:
                inputs, labels = make_batch(words, piece, with_others=False)
                logits = model(inputs, logits_to_keep=1).logits[:, -1]
                right += int((logits.argmax(-1) == labels[:, -1]).sum())
            found[row, column] = right / len(made)
    return found

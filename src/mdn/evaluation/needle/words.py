"""A closed vocabulary of words, so that a tiny model can be trained to find needles: every word, number and mark of the
generator is one token; words of the haystack that are too rare are <unk>."""

from __future__ import annotations

import random
import re
from collections import Counter

import torch
from torch import Tensor

from mdn.evaluation.needle.examples import INSTRUCTION, KEYS, NEEDLE, QUESTION, Example
from mdn.evaluation.needle.text import documentation_sentences, noise_sentence

_TOKEN = re.compile(r"\w+|[^\w\s]")
PAD, UNKNOWN = 0, 1


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


def make_batch(words: Words, examples: list[Example], with_others: bool) -> tuple[Tensor, Tensor]:
    """ids [B, T], padded on the left, and labels [B, T]: the answer at the end of every question, else -100."""
    rows: list[tuple[list[int], list[int]]] = []
    for example in examples:
        ids = words.encode(example.prompt)
        labels = [-100] * (len(ids) - 1) + words.encode(example.answer)
        for question, answer in example.others if with_others else ():
            asked, wanted = words.encode(question), words.encode(answer)
            ids += [*labels[-1:], *asked]
            labels += [-100] * len(asked) + wanted
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids, _ in rows])
    return inputs, torch.tensor([[-100] * (longest - len(labels)) + labels for _, labels in rows])

"""Needles for a trained language model: our own texts through its tokenizer, answers by greedy generation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from mdn.common.progress import progress
from mdn.evaluation.contains import contains
from mdn.evaluation.needle.examples import make_example


@torch.no_grad()
def find_needles_in_text(
    model: Any,
    tokenizer: Any,
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    *,
    examples: int = 10,
    haystack: str = "documentation",
    keys: int = 1,
    digits: int = 7,
    new_tokens: int = 16,
) -> np.ndarray:
    """[depths, lengths]: the share of examples whose number occurs in what the model writes next."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = np.zeros((len(depths), len(lengths)))
    cells = [(row, column) for column in range(len(lengths)) for row in range(len(depths))]
    for row, column in progress(cells, desc="needles", unit="cell"):
        source = random.Random(f"{lengths[column]} {depths[row]}")
        for _ in range(examples):
            options: dict[str, Any] = {"haystack": haystack, "keys": keys, "digits": digits}
            example = make_example(lengths[column], depths[row], count, source, **options)
            ids = tokenizer(example.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
            settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
            pad = tokenizer.eos_token_id
            output = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=pad, **settings)
            written = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            found[row, column] += contains(written, [example.answer]) / examples
    return found

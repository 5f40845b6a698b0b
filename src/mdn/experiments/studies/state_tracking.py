"""State tracking: parity, addition modulo 5, and the word problems of S3 and A5, beyond the length of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdn.experiments.studies.groups import GROUPS, product_table, word_problem
from mdn.experiments.studies.study import (
    EQUAL_PARAMETERS,
    EQUAL_STATE,
    SMALL_MODEL,
    TEST_SEED,
    Comparison,
    Study,
    TokenTask,
)
from mdn.experiments.tiny_training import LabelledTokens, labelled_accuracy
from mdn.ops.fused import IGNORE_INDEX

BATCH_TOKENS = 1024
TRAIN_LENGTHS = (8, 16, 32)
MULTIPLES = (1, 2, 4)
CONTESTANTS = (
    "mdn",
    "mdn-half",
    "mdn-negative",
    "gdn",
    "gdn-double",
    "gdn-negative",
    "deltaproduct",
    "mamba2",
    "attention",
)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True, kw_only=True)
class WordProblemTask(TokenTask):
    group: str
    examples: int = 200

    def settings(self) -> dict[str, Any]:
        constants = {"batch_tokens": BATCH_TOKENS, "train_lengths": TRAIN_LENGTHS, "multiples": MULTIPLES}
        return super().settings() | constants

    def vocab_size(self) -> int:
        return len(GROUPS[self.group])

    def table(self) -> Tensor:
        return product_table(GROUPS[self.group])

    def batches(self, seed: int, steps: int) -> Iterator[LabelledTokens]:
        generator, table = torch.Generator().manual_seed(seed), self.table()
        for _ in range(steps):
            length = TRAIN_LENGTHS[int(torch.randint(len(TRAIN_LENGTHS), (), generator=generator))]
            yield word_problem(BATCH_TOKENS // length, length, table, generator)

    def test(self, model: Any) -> dict[str, float]:
        """Every stretch is scored by itself: "2x" is the second half of words twice as long as those of training."""
        once = max(TRAIN_LENGTHS)
        longest = max(MULTIPLES) * once
        inputs, labels = word_problem(self.examples, longest, self.table(), torch.Generator().manual_seed(TEST_SEED))
        found, begin = {}, 0
        for multiple in MULTIPLES:
            asked = labels.clone()
            asked[:, :begin] = IGNORE_INDEX
            asked[:, multiple * once :] = IGNORE_INDEX
            found[f"{multiple}x"] = labelled_accuracy(model, map(LabelledTokens, inputs.split(50), asked.split(50)))
            begin = multiple * once
        return found

    def baselines(self) -> dict[str, dict[str, float]]:
        return {"chance": dict.fromkeys((f"{multiple}x" for multiple in MULTIPLES), 1 / self.vocab_size())}


def _task(group: str, title: str, steps: int, seconds: float, more: tuple[str, ...] = ()) -> WordProblemTask:
    return WordProblemTask(
        name=group,
        title=title,
        phrase=title if group == "mod 5" else group,
        contestants=CONTESTANTS + more,
        rates=RATES,
        seconds=seconds,
        steps=steps,
        model=SMALL_MODEL | {"use_mlp": True, "intermediate_size": 128, "tie_word_embeddings": False},
        group=group,
    )


STUDY = Study(
    "state-tracking",
    "Which rules can follow a state beyond the length of training?",
    (
        _task("parity", "addition modulo 2", 800, 12, ("gdn-bounds-negative",)),
        _task("mod 5", "addition modulo 5", 800, 12),
        _task("S3", "permutations of three", 800, 12),
        _task("A5", "even permutations of five", 800, 12),
    ),
    (
        EQUAL_PARAMETERS,
        *EQUAL_STATE,
        Comparison(
            "mdn-negative", "gdn-negative", "equal parameters (writes up to twice as strong, MDN within its bounds)"
        ),
        Comparison(
            "mdn-negative",
            "gdn-bounds-negative",
            "equal parameters (writes up to twice as strong, both within MDN's bounds)",
        ),
    ),
)

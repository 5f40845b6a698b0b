"""Language: byte models on the Python standard library, and the same data for the ablation of the rule's parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from mdn.experiments.studies.study import (
    BITS,
    CORPUS,
    EQUAL_PARAMETERS,
    SMALL_MODEL,
    Comparison,
    Metric,
    Study,
    TokenTask,
)
from mdn.experiments.tiny_training import LabelledTokens
from mdn.training.dataset import PackCollator, PackedSequences, PreparedData, prepare_data
from mdn.training.evaluate import evaluate
from mdn.training.recipe import validate

BATCH_TOKENS, SEQUENCE_LENGTH, HELD_OUT_BYTES = 2048, 256, 100_000
MILLION = 1_000_000 // BATCH_TOKENS  # steps
BYTE_MODEL: dict[str, Any] = SMALL_MODEL | {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "use_mlp": True,
    "intermediate_size": 384,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


@cache
def _data() -> PreparedData:
    recipe = {
        "name": "study",
        "output": "unused",
        "model": {"hidden_size": BYTE_MODEL["hidden_size"]},
        "data": {"source": "stdlib", "held_out_bytes": HELD_OUT_BYTES, "reset_at_documents": False},
        "tokenizer": {"kind": "bytes"},
        "training": {"batch_tokens": BATCH_TOKENS, "sequence_length": SEQUENCE_LENGTH, "steps": 1},
    }
    return prepare_data(validate(recipe, "the data of a study"))


@dataclass(frozen=True, kw_only=True)
class LanguageTask(TokenTask):
    metric: ClassVar[Metric] = BITS

    def settings(self) -> dict[str, Any]:
        own = {"batch_tokens": BATCH_TOKENS, "sequence_length": SEQUENCE_LENGTH, "held_out_bytes": HELD_OUT_BYTES}
        return super().settings() | own

    def vocab_size(self) -> int:
        return _data().cache.vocab_size

    def batches(self, seed: int, steps: int) -> Iterator[LabelledTokens]:
        rows = BATCH_TOKENS // SEQUENCE_LENGTH
        sequences = PackedSequences(_data().training, SEQUENCE_LENGTH, steps * rows, seed)
        collate = PackCollator(reset_at_documents=False)
        for step in range(steps):
            batch = collate([sequences[step * rows + row] for row in range(rows)])
            yield LabelledTokens(batch["input_ids"], batch["shift_labels"])

    def test(self, model: Any) -> dict[str, float]:
        found = evaluate(model, _data().held_out, SEQUENCE_LENGTH, False, show=False)
        return {"held out": float(found["bits_per_byte"])}

    def facts(self) -> dict[str, Any]:
        """The standard library differs between versions of Python: cells of different texts are not comparable."""
        return {CORPUS: _data().training.bytes, "held-out bytes": _data().held_out.bytes}


FOUR_MILLION = LanguageTask(
    name="4M tokens",
    phrase="4 million tokens of bytes",
    title="bytes of the Python standard library",
    contestants=(
        "mdn",
        "mu0",
        "gdn",
        "qhm-fast",
        "mdn-fast",
        "qhm",
        "gdn-bounds",
        "comba",
        "mamba2",
        "attention",
        "kda",
    ),
    rates=(1e-3, 2e-3, 5e-3, 1e-2),
    seeds=2,
    seconds=350,
    steps=4 * MILLION,
    tuning_steps=MILLION // 4,
    checkpoints=(MILLION // 4, MILLION // 2, MILLION, 2 * MILLION),
    model=BYTE_MODEL,
)
TWELVE_MILLION = LanguageTask(
    name="12M tokens",
    phrase="12 million tokens of bytes",
    title="three times as long",
    contestants=("mdn", "mu0", "gdn", "qhm-fast"),
    rates=FOUR_MILLION.rates,
    rates_from=FOUR_MILLION,
    seeds=2,
    seconds=1050,
    steps=12 * MILLION,
    checkpoints=(MILLION, 2 * MILLION, 4 * MILLION, 8 * MILLION),
    model=BYTE_MODEL,
)
STUDY = Study(
    "language",
    "What does momentum do to a byte language model, and does the gap to mu = 0 last?",
    (FOUR_MILLION, TWELVE_MILLION),
    (
        Comparison("mdn", "mu0", "equal parameters"),
        EQUAL_PARAMETERS,
        Comparison("qhm-fast", "mu0", "equal parameters"),
        Comparison("qhm-fast", "mdn", "equal state (quasi-hyperbolic, mu 10 x faster, against the paper's momentum)"),
    ),
)

"""`mdn eval MODEL --suite mqar`: the test segments of an MQAR recipe on a saved model (`mdn mqar --save-models`)."""

from __future__ import annotations

from typing import Any

from mdn.evaluation.mqar.recipe import MqarRecipe
from mdn.evaluation.mqar.train import test_accuracy
from mdn.evaluation.suites import Column, Suite, Work


def mqar_suite(recipe: MqarRecipe) -> Suite:
    columns = (
        Column(f"length {segment.length}", f"{segment.pairs} pairs", Work(f"mqar-{segment.name}"), "acc")
        for segment in recipe.test
    )
    return Suite("mqar", tuple(columns), average="acc ↑")


def mqar_results(model: Any, recipe: MqarRecipe) -> dict[Work, dict[str, Any]]:
    if model.config.vocab_size < recipe.task.vocab_size:
        raise ValueError(
            f"the model's vocabulary of {model.config.vocab_size} is smaller than the recipe's task.vocab_size="
            f"{recipe.task.vocab_size}; --suite mqar is for models of `mdn mqar --save-models`"
        )
    found = test_accuracy(model, recipe)
    return {Work(f"mqar-{name}"): {"metrics": {"acc": accuracy}} for name, accuracy in found.items()}


def load_mqar_model(source: str) -> Any:
    """A model without a tokenizer."""
    from mdn.common.loading import load_model

    return load_model(source)

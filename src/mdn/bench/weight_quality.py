"""What packed weights cost in quality: held-out bits per byte of trained models in float32 and in every packed format.

The held-out text is that of the run: its recipe says where it comes from and how it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mdn.common.files import read_json
from mdn.common.loading import load_model, resolve_model
from mdn.common.results import Table
from mdn.training.dataset import prepare_data
from mdn.training.evaluate import evaluate
from mdn.training.recipe import Recipe, load_recipe

ORIGINAL = "float32"


class TrainedModel(NamedTuple):
    """A model that a run left behind, at its end or at a checkpoint."""

    place: str
    recipe: Recipe
    steps: int


def trained_model(source: str) -> TrainedModel:
    """The model of a run folder, or of its ``model`` or one of its checkpoints."""
    place = Path(resolve_model(source))
    run_dir = next((folder for folder in (place, place.parent) if (folder / "recipe.yaml").is_file()), None)
    if run_dir is None:
        raise ValueError(f"{source} is not of a training run: neither it nor its parent holds recipe.yaml")
    recipe = load_recipe(str(run_dir), [])
    checkpoint = re.fullmatch(r"checkpoint-(\d+)", place.name)
    return TrainedModel(str(place), recipe, int(checkpoint[1]) if checkpoint else recipe.training.total_steps)


def measure(source: str, formats: Sequence[str]) -> dict[str, Any]:
    """Bits per byte of one model in float32 and in ``formats``; ``change`` is relative to float32."""
    trained = trained_model(source)
    data, training = prepare_data(trained.recipe), trained.recipe.training
    _check_vocabulary(trained, data.cache.vocab_size)
    rows: list[dict[str, Any]] = []
    parameters = 0
    for name in (ORIGINAL, *formats):
        model = load_model(trained.place, dtype=ORIGINAL)
        if name == ORIGINAL:
            parameters = model.num_parameters()
        else:
            model.quantize(name)
        found = evaluate(model, data.held_out, training.sequence_length, trained.recipe.data.reset_at_documents)
        bits = found["bits_per_byte"]
        change = bits / rows[0]["bits_per_byte"] - 1 if rows else 0.0
        rows.append({"format": name, "bits_per_byte": bits, "change": change})
    return {
        "name": trained.recipe.name,
        "parameters": parameters,
        "trained_tokens": trained.steps * training.batch_tokens,
        "held_out_bytes": data.held_out.bytes,
        "rows": rows,
    }


def _check_vocabulary(trained: TrainedModel, size: int) -> None:
    found = read_json(Path(trained.place) / "config.json").get("vocab_size")
    if found != size:
        raise ValueError(
            f"{trained.place} has a vocabulary of {found}, but the text of its recipe gives one of {size}: the text "
            "has changed since the run"
        )


def table(models: Sequence[dict[str, Any]]) -> Table:
    formats = [row["format"] for row in models[0]["rows"]]
    lines = []
    for model in models:
        cells = [f"{row['bits_per_byte']:.4f} ({row['change']:+.2%})" for row in model["rows"][1:]]
        size = f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters"
        trained = f"{model['trained_tokens'] / 1e6:.2f} M tokens"
        lines.append([size, trained, f"{model['rows'][0]['bits_per_byte']:.4f}", *cells])
    return Table("held-out bits per byte (change)", ["model", "trained on", *formats], lines)

"""Turns a directory of safetensors from FLA or transformers into one of this project's models.

Nothing is guessed: every parameter of the source must find its place with the right shape, and every parameter of the
model must be filled; otherwise the error lists all that did not fit, and nothing is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from mdn.models.config import MomentumDeltaNetConfig
from mdn.models.convert_families import FAMILIES, NEVER_STORED, REQUIRED, Family, Fields
from mdn.models.modeling import MomentumDeltaNetForCausalLM

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json"),
)
HEAD, EMBEDDING = "lm_head.weight", "model.embeddings.weight"


@dataclass(frozen=True)
class Conversion:
    """What was read: the source's kind, our config, and for every parameter of ours the name it had there."""

    model_type: str
    config: MomentumDeltaNetConfig
    matched: dict[str, str]
    weights: dict[str, Tensor]

    def patterns(self) -> list[tuple[str, str, int]]:
        """(their name, our name, how often), with layer numbers as `*`."""
        counts: dict[tuple[str, str], int] = {}
        for ours, theirs in self.matched.items():
            pattern = re.sub(r"\.\d+\.", ".*.", theirs, count=1), re.sub(r"\.\d+\.", ".*.", ours, count=1)
            counts[pattern] = counts.get(pattern, 0) + 1
        return [(theirs, ours, count) for (theirs, ours), count in counts.items()]


def read_checkpoint(source: Path, progress: bool = False) -> Conversion:
    """Reads and checks everything; a ValueError lists what does not fit."""
    given = _read_config(source)
    family = FAMILIES.get(given.get("model_type", ""))
    if family is None:
        kinds = ", ".join(FAMILIES)
        raise ValueError(f"{source}: cannot convert model_type {given.get('model_type')!r}; known are {kinds}")
    config = translate_config(family, given)
    with torch.device("meta"):
        expected = {name: x.shape for name, x in MomentumDeltaNetForCausalLM(config).state_dict().items()}
    matched: dict[str, str] = {}
    weights: dict[str, Tensor] = {}
    problems: list[str] = []
    for theirs, value in _tensors(source, progress):
        ours = rename(family, theirs)
        if ours is None:
            continue
        if ours not in expected:
            problems.append(f"{theirs} has no place in the model")
        elif value.shape != expected[ours]:
            problems.append(f"{theirs} has shape {list(value.shape)}, expected {list(expected[ours])}")
        else:
            matched[ours], weights[ours] = theirs, value
    if config.tie_word_embeddings and EMBEDDING in weights:
        weights[HEAD] = weights[EMBEDDING]
    missing = [name for name in expected if name not in weights]
    reported = {rename(family, problem.split(" ", 1)[0]) for problem in problems}
    problems += [f"{name} was not found" for name in missing if name not in reported]
    if problems:
        raise ValueError(f"{source}: {len(matched)} parameters matched, {len(problems)} did not: {'; '.join(problems)}")
    return Conversion(given["model_type"], config, matched, weights)


def write_model(conversion: Conversion, source: Path, target: Path) -> None:
    """Writes the converted model and the source's tokenizer to a new directory."""
    refuse_used(target)
    with torch.device("meta"):
        model = MomentumDeltaNetForCausalLM(conversion.config)
    model.load_state_dict(conversion.weights, assign=True)
    model.tie_weights()
    save_with_tokenizer(model, source, target)


def refuse_used(target: Path) -> None:
    """A ValueError unless ``target`` can be a new directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty directory: give a new one")


def save_with_tokenizer(model: MomentumDeltaNetForCausalLM, source: Path, target: Path) -> None:
    """The model, and the tokenizer's files that are in ``source``, in a new directory: all of it, or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        unfinished = Path(scratch) / target.name
        model.save_pretrained(unfinished)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, unfinished / name)
        if target.exists():
            target.rmdir()
        os.replace(unfinished, target)


def translate_config(family: Family, given: Fields) -> MomentumDeltaNetConfig:
    """Our config for theirs; a ValueError names every setting that has no counterpart here."""
    if not family.fields:
        return MomentumDeltaNetConfig.from_dict(given)
    problems = [
        f"{name} must be {' or '.join(map(repr, allowed))}, got {given[name]!r}"
        for name, allowed in family.must_be.items()
        if name in given and given[name] not in allowed
    ]

    def look_up(table: Any) -> Fields:
        for theirs, default in table.values():
            if default is REQUIRED and theirs not in given:
                problems.append(f"{theirs} is missing")
        return {ours: given.get(theirs, default) for ours, (theirs, default) in table.items()}

    ours = look_up(family.fields) | {"mixer": family.mixer, "mixer_options": look_up(family.options) or None}
    if not problems:
        try:
            family.finish(ours, given)
            return MomentumDeltaNetConfig(**ours)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(f"config.json of a {given['model_type']} model: {'; '.join(problems)}")


def rename(family: Family, name: str) -> str | None:
    """Our name of their parameter; None for buffers that are computed and not stored here."""
    if re.search(NEVER_STORED, name):
        return None
    for pattern, replacement in family.renames:
        name = re.sub(pattern, replacement, name)
    return name


def _read_config(source: Path) -> Fields:
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(f"{source} is not a model directory: it has no config.json")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _tensors(source: Path, progress: bool):
    """(name, tensor) of all safetensors files in the directory."""
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{source} has no *.safetensors files")
    with tqdm(unit="tensor", disable=not progress, leave=False) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt") as stored:
                    for name in stored.keys():  # noqa: SIM118 (not a dict)
                        yield name, stored.get_tensor(name)
                        bar.update()
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error}") from None
            except Exception as error:
                if type(error).__name__ == "SafetensorError":
                    raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
                raise

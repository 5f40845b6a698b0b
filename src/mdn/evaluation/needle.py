"""Needles in haystacks of our own making, and how often a language model finds them.

    instruction, haystack with "One of the special magic numbers for KEY is: VALUE." at some depth, question -> VALUE

RULER's rules for texts: facts hidden in a haystack, with a question at its end. Nothing is downloaded: the hay is noise
sentences, or prose from the docstrings of the standard library of the interpreter that runs this. `make_example` works
with any tokenizer: ``length`` counts tokens of the prompt and the answer together.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from mdn.common.loading import prompt_ids
from mdn.common.progress import progress
from mdn.common.results import Table
from mdn.evaluation.contains import contains
from mdn.evaluation.suites import Suite
from mdn.evaluation.tables import Results, number_of
from mdn.training.corpus import standard_library_files

# ------------------------------------------------------------------------------------------------------------- the hay

DOCUMENTED_MODULES = 200
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_PLAIN_SENTENCE = re.compile(r"[A-Z][A-Za-z ,;'-]{20,160}[.!?]")

_SUBJECTS = (
    "The river",
    "A lamp",
    "The old clock",
    "My neighbour",
    "The wind",
    "A small boat",
    "The baker",
    "The road",
)
_VERBS = ("waits for", "follows", "remembers", "passes", "looks at", "leads to", "belongs to", "is far from")
_OBJECTS = ("the quiet town", "the green hill", "a closed door", "the morning train", "the long bridge", "the sea")


def sentences(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(text.strip()) if part]


def noise_sentence(source: random.Random) -> str:
    return f"{source.choice(_SUBJECTS)} {source.choice(_VERBS)} {source.choice(_OBJECTS)}."


@cache
def documentation_sentences() -> tuple[str, ...]:
    """Plain English sentences of the docstrings of the first modules, in order, without repetition."""
    found: dict[str, None] = {}
    for path in standard_library_files()[:DOCUMENTED_MODULES]:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                found.update(dict.fromkeys(part for part in sentences(text) if _PLAIN_SENTENCE.fullmatch(part)))
    if not found:
        raise ValueError("the standard library's sources have no docstrings to make a haystack from")
    return tuple(found)


def documentation_text() -> str:
    return " ".join(documentation_sentences())


# --------------------------------------------------------------------------------------------------------- the needles

HAYSTACKS = ("noise", "documentation")
_KEY_WORDS = """
amber anchor arrow basin beacon birch bottle branch bridge candle canyon cedar chalk clover cobalt copper
coral cotton crane desert ember fable falcon feather fern flint forest garden ginger glacier granite harbor
hazel heron island ivory jasmine kettle ladder lagoon lantern laurel lemon linen maple marble meadow mirror
needle nickel ocean olive orchid otter pebble pepper pillar planet plum quartz raven saddle silver tulip
"""
KEYS = tuple(_KEY_WORDS.split())
INSTRUCTION = "Some special magic numbers are hidden within the following text."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = "The special magic number for {key} is:"
SHORT_NUMBER = 2
"""digits of a number that can be one token of a small vocabulary"""
LONG_NUMBER = 7
"""digits of RULER's numbers, for language models"""


@dataclass(frozen=True)
class NeedleExample:
    """``prompt`` ends with the question for the needle at ``depth`` (0: at the beginning, 1: at the end). ``others``
    are the questions for the other needles with their answers: more to learn from in training."""

    prompt: str
    answer: str
    depth: float
    others: tuple[tuple[str, str], ...] = ()


def check_keys(keys: int) -> None:
    if not 1 <= keys <= len(KEYS):
        raise ValueError(f"keys must be in 1..{len(KEYS)}, got {keys}")


def make_example(
    length: int,
    depth: float,
    count: Callable[[str], int],
    source: random.Random,
    *,
    haystack: str = "noise",
    keys: int = 1,
    digits: int = SHORT_NUMBER,
) -> NeedleExample:
    """The needle in question at ``depth`` and ``keys - 1`` others anywhere, filled with hay up to ``length`` tokens."""
    if haystack not in HAYSTACKS:
        raise ValueError(f"haystack must be one of {HAYSTACKS}, got {haystack!r}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be in [0, 1], got {depth}")
    check_keys(keys)
    names = source.sample(KEYS, keys)
    values = [str(number) for number in source.sample(range(10 ** (digits - 1), 10**digits), keys)]
    needles = [NEEDLE.format(key=key, value=value) for key, value in zip(names, values)]
    question = QUESTION.format(key=names[0])
    room = length - sum(map(count, [INSTRUCTION, question, f" {values[0]}", *needles]))
    if room < 0:
        raise ValueError(f"length={length} leaves no room for {keys} needles, the instruction and the question")
    hay = _hay(room, count, source, haystack)
    for needle in needles[1:]:
        hay.insert(source.randint(0, len(hay)), needle)
    hay.insert(round(depth * len(hay)), needles[0])
    others = tuple((QUESTION.format(key=key), value) for key, value in zip(names[1:], values[1:]))
    return NeedleExample(" ".join([INSTRUCTION, *hay, question]), values[0], depth, others)


def shortest_length(count: Callable[[str], int], keys: int, digits: int = SHORT_NUMBER) -> int:
    """A length that has room for any ``keys`` needles with their instruction and question."""
    value = "9" * digits
    check_keys(keys)
    needles = sorted((count(NEEDLE.format(key=key, value=value)) for key in KEYS), reverse=True)
    question = max(count(QUESTION.format(key=key)) for key in KEYS)
    return count(INSTRUCTION) + question + count(f" {value}") + sum(needles[:keys])


def _hay(room: int, count: Callable[[str], int], source: random.Random, haystack: str) -> list[str]:
    """Sentences that together have at most ``room`` tokens."""
    kept: list[str] = []
    documentation = documentation_sentences() if haystack == "documentation" else ()
    place = source.randrange(len(documentation)) if documentation else 0
    while True:
        sentence = documentation[place % len(documentation)] if documentation else noise_sentence(source)
        place += 1
        room -= count(" " + sentence)
        if room < 0:
            return kept
        kept.append(sentence)


# -------------------------------------------------------------------------------------------------- asking and showing


@torch.no_grad()
def find_needles_in_text(
    model: Any,
    tokenizer: Any,
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    *,
    examples: int,
    haystack: str,
    keys: int,
    digits: int = LONG_NUMBER,
    new_tokens: int = 16,
    seed: int = 0,
) -> np.ndarray:
    """[depths, lengths]: the share of examples whose number occurs in what the model writes next. ``seed`` is that of
    the texts."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    shortest = shortest_length(count, keys, digits)
    if min(lengths) < shortest:
        raise ValueError(f"--lengths must be at least {shortest} for {keys} needles, got {min(lengths)}")
    found = np.zeros((len(depths), len(lengths)))
    cells = [(row, column) for column in range(len(lengths)) for row in range(len(depths))]
    for row, column in progress(cells, desc="needles", unit="cell"):
        source = random.Random(f"{seed} {lengths[column]} {depths[row]}")
        for _ in range(examples):
            options: dict[str, Any] = {"haystack": haystack, "keys": keys, "digits": digits}
            example = make_example(lengths[column], depths[row], count, source, **options)
            ids = torch.tensor([prompt_ids(model, tokenizer, example.prompt)], device=model.device)
            settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
            pad = tokenizer.eos_token_id
            output = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=pad, **settings)
            written = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            found[row, column] += contains(written, [example.answer]) / examples
    return found


def tables(content: dict[str, Any]) -> list[Table]:
    """Share of needles found: a row per model and depth, a column per length."""
    rows = [
        [label, f"{100 * depth:.0f} %", *(f"{100 * score:.0f}" for score in scores)]
        for label, found in content["found"].items()
        for depth, scores in zip(content["depths"], found)
    ]
    return [Table("needles found, %", ["model", "depth", *(f"{length} tokens" for length in content["lengths"])], rows)]


def draw(content: dict[str, Any]) -> Any:
    """A heat-map per model: depth over length."""
    maps = {label: np.asarray(scores, dtype=float) for label, scores in content["found"].items()}
    depths = [f"{100 * depth:.0f} %" for depth in content["depths"]]
    return heat_maps(maps, depths, [str(length) for length in content["lengths"]], y="depth", x="tokens")


def draw_suite(suite: Suite, results: dict[str, Results]) -> Any:
    """RULER's tasks over haystack lengths, a heat-map per model."""
    tasks = list(dict.fromkeys(column.group for column in suite.columns))
    lengths = list(dict.fromkeys(column.title for column in suite.columns))
    maps = {}
    for label, found in results.items():
        scores = np.full((len(tasks), len(lengths)), np.nan)
        for column in suite.columns:
            number = number_of(column, found)
            if number is not None:
                scores[tasks.index(column.group), lengths.index(column.title)] = number / 100
        maps[label] = scores
    return heat_maps(maps, tasks, lengths, y="task", x="length")


def heat_maps(maps: dict[str, np.ndarray], rows: Sequence[str], columns: Sequence[str], *, y: str, x: str) -> Any:
    """One panel per entry of ``maps``: scores in [0, 1], [rows, columns], NaN where there is none."""
    from mdn.common.plots import figure

    width = max(3.0, 1.4 + 0.62 * len(columns))
    size = (1.0 + width * len(maps), 1.4 + 0.46 * len(rows))
    fig, axes = figure("", x, "", columns=len(maps), size=size)
    panels = [axes] if len(maps) == 1 else list(axes.flat)
    for number, (axis, (title, scores)) in enumerate(zip(panels, maps.items())):
        image = axis.imshow(scores, vmin=0, vmax=1, cmap="YlGnBu", aspect="auto")
        axis.set(title=title, ylabel=y if number == 0 else "")
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
        axis.grid(False)
        for place, score in np.ndenumerate(scores):
            if not np.isnan(score):
                ink = "white" if score > 0.55 else "black"  # the map is dark where much was found
                text = f"{100 * score:.0f}"
                axis.text(place[1], place[0], text, ha="center", va="center", fontsize=9, color=ink)
    colours = fig.colorbar(image, ax=panels, shrink=0.9, format=lambda share, _: f"{100 * share:.0f} %")
    colours.set_label("needles found")
    return fig

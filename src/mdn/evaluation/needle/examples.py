"""Needle examples by RULER's rules for texts: facts hidden in a haystack, asked for at its end.

    instruction, haystack with "One of the special magic numbers for KEY is: VALUE." at some depth, question -> VALUE

`make_example` works with any tokenizer: `length` counts tokens of the prompt and the answer together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mdn.evaluation.needle.text import documentation_sentences, noise_sentence

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


@dataclass(frozen=True)
class Example:
    """``prompt`` ends with the question for the needle at ``depth`` (0: at the beginning, 1: at the end). ``others``
    are the questions for the other needles with their answers: more to learn from in training."""

    prompt: str
    answer: str
    depth: float
    others: tuple[tuple[str, str], ...] = ()


def make_example(
    length: int,
    depth: float,
    count: Callable[[str], int],
    source: random.Random,
    *,
    haystack: str = "noise",
    keys: int = 1,
    digits: int = 2,
) -> Example:
    """One asked needle at ``depth`` and ``keys - 1`` others anywhere, filled with hay up to ``length`` tokens."""
    if haystack not in HAYSTACKS:
        raise ValueError(f"haystack must be one of {HAYSTACKS}, got {haystack!r}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be in [0, 1], got {depth}")
    if not 1 <= keys <= len(KEYS):
        raise ValueError(f"keys must be in 1..{len(KEYS)}, got {keys}")
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
    return Example(" ".join([INSTRUCTION, *hay, question]), values[0], depth, others)


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

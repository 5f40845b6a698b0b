"""Haystacks that everyone has: plain noise sentences, and prose from the documentation of Python's standard library.

The prose is what the modules' own docstrings say, read from the sources of the interpreter that runs this.
"""

from __future__ import annotations

import ast
import random
import re
from functools import cache

from mdn.training.corpus import standard_library_files

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
def documentation_sentences(modules: int = 200) -> tuple[str, ...]:
    """Plain English sentences of the docstrings of the first ``modules`` modules, in order, without repetition."""
    found: dict[str, None] = {}
    for path in standard_library_files()[:modules]:
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

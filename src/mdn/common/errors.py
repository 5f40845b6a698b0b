"""Texts of errors that a user can fix."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' when something known is close to `name`, else ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """The same for dotted keys: `training.lr` means `training.learning_rate`, `steps` means `training.steps`.

    Keys of the same block come first, then equal last words in other blocks; initials count as a spelling.
    """
    known = list(known)
    block, _, word = key.rpartition(".")
    siblings = [candidate for candidate in known if candidate.rpartition(".")[0] == block]
    for candidates in (siblings, known):
        for candidate in candidates:
            words = candidate.rpartition(".")[2]
            if word in (words, "".join(part[0] for part in words.split("_"))):
                return f" (did you mean {candidate}?)"
        leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
        close = difflib.get_close_matches(word, leaves, n=1, cutoff=0.6)
        if close:
            return f" (did you mean {leaves[close[0]]}?)"
    return nearest(key, known)


def one_line(error: BaseException, limit: int = 400) -> str:
    """The message of an exception on one line; its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        text = f"the disk is full: {text}"
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def is_out_of_memory(error: BaseException) -> bool:
    """Python's MemoryError, or what torch and NumPy say instead of it."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "Unable to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )

"""RULER's needle tasks on texts other than the essays on the Hub, and without making samples that are not needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from mdn.evaluation.needle import sentences

# The tasks' own module keeps references to the functions that it imported, so it has to be imported again.
_TASK_MODULE = "lm_eval.tasks.ruler.niah_utils"


@contextmanager
def adapted_ruler(text: str | None, limit: int | None) -> Iterator[None]:
    """``text`` replaces the essays (None: keep them), cut into sentences after ., ! and ?. With a ``limit`` only the
    first samples are made: they are the same, and long ones take a while."""
    if text is None and limit is None:
        yield
        return
    prepare = _import_without_download() if text is not None else _import()
    names = ("get_haystack", "cached_sent_tokenize", "generate_samples")
    original = {name: getattr(prepare, name) for name in names}
    words = [] if text is None else text.split()

    def haystack(type_haystack: str) -> Any:
        return words if words and type_haystack == "essay" else original["get_haystack"](type_haystack)

    def samples(*args: Any, **options: Any) -> Any:
        needed = options["num_samples"] if limit is None else min(limit, options["num_samples"])
        return original["generate_samples"](*args, **{**options, "num_samples": needed})

    prepare.get_haystack, prepare.generate_samples = haystack, samples
    prepare.cached_sent_tokenize = sentences if words else original["cached_sent_tokenize"]
    sys.modules.pop(_TASK_MODULE, None)
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(prepare, name, function)
        sys.modules.pop(_TASK_MODULE, None)


def _import() -> Any:
    from lm_eval.tasks.ruler import prepare_niah

    return prepare_niah


def _import_without_download() -> Any:
    """Importing the module downloads NLTK's sentence splitter, which other texts do not need."""
    import nltk

    download, nltk.download = nltk.download, lambda *args, **kwargs: True
    try:
        with redirect_stdout(StringIO()):  # it would report a download
            return _import()
    finally:
        nltk.download = download

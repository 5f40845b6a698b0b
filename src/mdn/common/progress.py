"""Progress bars."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

silent = False
"""True in worker processes"""


def progress(iterable: Any = None, **options: Any) -> Any:
    """tqdm; when its output is a file or a log, a line every ten seconds instead of a moving bar."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(iterable, mininterval=interval, **(options | {"disable": silent or options.get("disable", False)}))


def end_bars() -> None:
    """Close the bars that an exception has left open, so that its message begins a line of its own."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()

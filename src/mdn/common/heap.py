"""Memory that a process has freed and will need again."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""glibc's numbers"""


def keep_freed_memory() -> bool:
    """Asks the C library to keep freed memory for the next training step; returns whether it will.

    By default glibc gives large blocks and the end of its heap back when they are freed, and the next step faults them
    in again page by page: 50,000 to 120,000 pages for 8,192 tokens of a model with 2.6 million parameters. The number
    depends on what else is in the heap. Here no block is mapped by itself (M_MMAP_MAX) and the heap never shrinks
    (M_TRIM_THRESHOLD). A user's MALLOC_TRIM_THRESHOLD_ is respected. Linux with glibc only; elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux") or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, -1)) and bool(mallopt(M_MMAP_MAX, 0))

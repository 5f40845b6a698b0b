"""Memory that a process has freed and will need again."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
"""of glibc; only larger blocks are then returned to the system when they are freed"""


def keep_freed_memory() -> bool:
    """Asks the C library to keep freed memory for the next training step; whether it will.

    By default glibc gives the end of its heap back after every step, and the next one faults it in again page by page,
    50,000 to 120,000 pages for 8,192 tokens of RWKV-7. Which model of a process this happens to, if any, depends on
    what else lies in the heap. A user's MALLOC_TRIM_THRESHOLD_ is respected. Linux with glibc only; elsewhere nothing
    changes.
    """
    if not sys.platform.startswith("linux") or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    # The first setting ends the automatic choice of the second, which would otherwise stay at 128 KiB.
    return bool(mallopt(M_TRIM_THRESHOLD, -1)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD))

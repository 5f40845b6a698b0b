"""New tensors whose memory is cheap to touch for the first time.

Memory fresh from the system faults in page by page: at 4 KiB a page that takes longer than the products that fill it.
Where Linux gives huge pages to those who ask (the usual setting, ``madvise``), large tensors ask. NumPy does the same.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty``, on huge pages where that is possible."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and math.prod(shape) * dtype.itemsize >= 2 * HUGE_PAGE:
        first = -(-x.data_ptr() // HUGE_PAGE)
        end = (x.data_ptr() + x.nbytes) // HUGE_PAGE
        _ask_for_huge_pages()(first * HUGE_PAGE, (end - first) * HUGE_PAGE)
    return x


@cache
def _ask_for_huge_pages() -> Callable[[int, int], object]:
    """(address, bytes) -> None: a hint to the system, or nothing where there is no such hint."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return lambda address, size: None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda address, size: madvise(address, size, advice)

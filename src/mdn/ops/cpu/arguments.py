"""Tensors as the kernel takes them: right dtype, contiguous, shapes checked before any address is handed to C."""

from __future__ import annotations

import torch
from torch import Tensor


def values(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """``x`` contiguous in ``dtype``; its shape must be ``shape``."""
    if x.shape == shape and x.dtype is dtype and x.is_cpu and x.is_contiguous():
        return x  # the usual case, kept short: a decode step comes here nine times
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if not x.is_cpu:
        raise ValueError(f"{name} must be a CPU tensor for the native CPU kernel, got one on {x.device}")
    return x.detach().to(dtype).contiguous()


def optional_values(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    return None if x is None else values(name, x, dtype, shape)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def io_dtype(q: Tensor) -> torch.dtype:
    """bfloat16 is read and written as it is; everything else goes through float32. (Gates and states may have any
    dtype: they are cast to float32, as every backend casts them to the dtype of the computation.)"""
    if q.dtype == torch.float64:
        raise ValueError("q must be float32 or bfloat16 for the native CPU kernel, got float64")
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def check_heads(key_heads: int, value_heads: int) -> None:
    if key_heads < 1 or value_heads % key_heads != 0:
        raise ValueError(f"v must have a multiple of the {key_heads} heads of q and k, got {value_heads}")


def check_result(code: int) -> None:
    if code == 1:
        raise MemoryError("the native CPU kernel could not allocate its scratch memory")
    if code == 2:
        raise ValueError("state_indices must be slots of the state: an index is negative or too large")

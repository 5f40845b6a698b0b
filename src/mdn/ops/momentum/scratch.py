"""Scratch memory of the torch backend: one typed tensor per temporary, reused by later groups and later calls.

Megabyte temporaries that are freed go back to the system, and every page of them faults in again at the next use; on a
CPU that costs more than many of the products. So a thread keeps one block, and the temporaries of a group of chunks are
views of it. The types name the shapes: Z pairs of chunk and value head, C tokens, K and V head dimensions, G = K if p
is given and else 0, P = C rounded up to a power of two, W the widest row, scalars the gates and norms of a token.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from mdn.ops.pairwise import next_power_of_two

KEPT_BYTES = 128 * 2**20
"""A thread that needed more than this in one call gives everything back after it."""


class GroupSize(NamedTuple):
    """The letters of the shapes below."""

    Z: int
    C: int
    K: int
    V: int
    scalars: int
    given_p: bool
    gathers: bool

    def letters(self) -> dict[str, int]:
        sizes = {"2": 2, "Z": self.Z, "C": self.C, "2C": 2 * self.C, "C+1": self.C + 1}
        return sizes | {
            "P": next_power_of_two(self.C),
            "K": self.K,
            "2K": 2 * self.K,
            "V": self.V,
            "G": self.K if self.given_p else 0,
            "scalars": self.scalars,
            "ZCW": self.Z * self.C * max(self.K, self.V, self.scalars) if self.gathers else 0,
        }


@dataclass
class LoadedScratch:
    """What every pass loads or fills."""

    gathered: Annotated[Tensor, "ZCW"]  # flat: rows of a pack on their way in or out
    scalars: Annotated[Tensor, "scalars Z C"]  # inverse norms and gates
    pq: Annotated[Tensor, "Z 2C K"]
    k: Annotated[Tensor, "Z C G"]
    residual: Annotated[Tensor, "Z C V"]


@dataclass
class ForwardRows(LoadedScratch):
    """What the rounds of the forward pass fill, beside ``residual``."""

    output: Annotated[Tensor, "Z C V"]


@dataclass
class BackwardRows(LoadedScratch):
    """What the rounds of the backward pass fill."""

    X: Annotated[Tensor, "Z 2K V"]  # states before each chunk
    grad_X: Annotated[Tensor, "Z 2K V"]  # gradients of the states after it
    grad_target_O: Annotated[Tensor, "Z 2C V"]  # grad_target, then grad_O: one product serves both
    grad_residual: Annotated[Tensor, "Z C V"]


@dataclass
class ChunkScratch(LoadedScratch):
    """What preparing chunks with scalar decays needs."""

    decays: Annotated[Tensor, "2 Z C+1 C+1"]
    gamma_M: Annotated[Tensor, "Z C+1 C+1"]
    scaled: Annotated[Tensor, "Z C+1 C+1"]
    gamma_S: Annotated[Tensor, "Z C+1 C+1"]
    pk_qk: Annotated[Tensor, "Z 2C C"]
    erase: Annotated[Tensor, "Z C C"]
    attend: Annotated[Tensor, "Z C C"]
    read: Annotated[Tensor, "Z 2C 2K"]
    write: Annotated[Tensor, "Z C 2K"]


@dataclass
class ForwardScratch(ChunkScratch, ForwardRows):
    pass


@dataclass
class BackwardScratch(ChunkScratch, BackwardRows):
    grad_read: Annotated[Tensor, "Z 2C 2K"]
    grad_write: Annotated[Tensor, "Z C 2K"]
    grad_masked: Annotated[Tensor, "Z 2C C"]
    grad_gamma_rows: Annotated[Tensor, "Z 2C C"]
    grad_gamma_S: Annotated[Tensor, "Z C+1 C+1"]
    changes: Annotated[Tensor, "2 Z C+1 C+1"]
    grad_q: Annotated[Tensor, "Z C K"]
    grad_k: Annotated[Tensor, "Z C G"]
    grad_p: Annotated[Tensor, "Z C K"]


@dataclass
class VectorScratch(LoadedScratch):
    """The same with a decay for every key dimension."""

    channels: Annotated[Tensor, "2 Z C K"]  # log_alpha and, if it has channels, log_mu
    leaves_read: Annotated[Tensor, "Z P 2 2K"]
    leaves_write: Annotated[Tensor, "Z P 2K"]
    scores: Annotated[Tensor, "Z P 2 P"]
    read: Annotated[Tensor, "Z 2C 2K"]


@dataclass
class VectorForwardScratch(VectorScratch, ForwardRows):
    pass


@dataclass
class VectorBackwardScratch(VectorScratch, BackwardRows):
    grad_read: Annotated[Tensor, "Z P 2 2K"]
    grad_write: Annotated[Tensor, "Z P 2K"]
    grad_scores: Annotated[Tensor, "Z P 2 P"]


Kind = TypeVar("Kind", bound=LoadedScratch)


class ScratchPool:
    """One block of memory and the views of it that were in use before. Only one group's may be in use at a time."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._block: Tensor | None = None
        self._views: dict[tuple[type[LoadedScratch], GroupSize], Any] = {}

    def take(self, kind: type[Kind], size: GroupSize) -> Kind:
        """Tensors with arbitrary content, in the memory of those that were taken before."""
        views: Kind | None = self._views.get((kind, size))
        if views is None:
            views = self._views[kind, size] = self._carve(kind, size)
        return views

    def _carve(self, kind: type[Kind], size: GroupSize) -> Kind:
        letters = size.letters()
        hints = get_type_hints(kind, include_extras=True)
        shapes = {name: [letters[x] for x in hint.__metadata__[0].split()] for name, hint in hints.items()}
        lengths = {name: -(-math.prod(shape) // 16) * 16 for name, shape in shapes.items()}  # 64 bytes apart
        total = sum(lengths.values())
        if self._block is None or len(self._block) < total:
            self._views.clear()
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
                self._block = torch.empty(total, dtype=self.dtype, device=self.device)
        parts = self._block[:total].split(list(lengths.values()))
        views = {name: part[: math.prod(shape)].view(shape) for (name, shape), part in zip(shapes.items(), parts)}
        return kind(**views)

    def end_call(self) -> None:
        """Give the memory back if it is too much to keep."""
        if (self._block is not None and self._block.nbytes > KEPT_BYTES) or len(self._views) > 64:
            self.forget()

    def forget(self) -> None:
        self._block = None
        self._views.clear()


_of_this_thread = threading.local()


def scratch_pool(device: torch.device, dtype: torch.dtype) -> ScratchPool:
    """This thread's own on a CPU. Other devices have caching allocators, and streams that must not share memory."""
    if device.type != "cpu":
        return ScratchPool(device, dtype)
    pools: dict[torch.dtype, ScratchPool] = _of_this_thread.__dict__.setdefault("pools", {})
    return pools.setdefault(dtype, ScratchPool(device, dtype))

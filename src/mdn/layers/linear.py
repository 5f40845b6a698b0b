"""Linear layers: ``Linear``, which every layer here is built from, and those whose weights are packed for inference.

``Linear`` is ``nn.Linear`` with a faster product of few rows (decoding) on a CPU.

``PackedLinear`` and ``PackedEmbedding`` have weights of 16, 8 or 4 bits (``mdn.ops.cpu.linear``) and take the place of
``nn.Linear`` and ``nn.Embedding`` in a finished model; the layer around them does not change. Few rows go through the
native kernel. Many rows (a prompt), other devices, gradients, whatever native code cannot follow (torch.func, tracers,
torch.export, subclasses of Tensor) and a machine without the kernel use the dequantised weights, which are the same
numbers.

Projections that read the same vector are one matrix for the kernel: ``SharedInput`` keeps their panels side by side
in memory and multiplies them all when the first of them is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.ops.cpu import why_unavailable
from mdn.ops.cpu.linear import MOST_ROWS, PANEL, PackedWeight, Product, pack, packed_like, side_by_side, unpack
from mdn.ops.fused import linear
from mdn.ops.shared_checks import in_plain_memory


class Linear(nn.Linear):
    """``nn.Linear``, faster for few rows outside training.

    In training the product is always torch's: a checkpointed layer runs without gradients first and with them again,
    and both must give the same numbers.
    """

    def forward(self, x: Tensor) -> Tensor:
        return (F.linear if self.training else linear)(x, self.weight, self.bias)


class Packed(nn.Module):
    """A matrix ``[outputs, inputs]`` in a packed format.

    Its buffers are integers, whatever they mean, so that a change of the model's dtype leaves them alone: ``packed``
    and, for ``int8`` and ``int4``, the bits of ``scales``.
    """

    packed: Tensor
    scales: Tensor | None

    def __init__(self, outputs: int, inputs: int, format: str, device: torch.device | str | None = None):
        super().__init__()
        self.outputs, self.inputs, self.format = outputs, inputs, format
        empty = packed_like(outputs, inputs, format, device)
        self.register_buffer("packed", _as_integers(empty.weights).zero_())
        self.register_buffer("scales", None if empty.scales is None else _as_integers(empty.scales).zero_())

    @property
    def packed_weight(self) -> PackedWeight:
        """The buffers, viewed in the dtypes they stand for."""
        kinds = packed_like(0, 0, self.format)
        scales = None if self.scales is None or kinds.scales is None else self.scales.view(kinds.scales.dtype)
        return PackedWeight(self.format, self.outputs, self.inputs, self.packed.view(kinds.weights.dtype), scales)

    @property
    def weight(self) -> Tensor:
        """The weights ``[outputs, inputs]`` that are computed with, float32, dequantised at every use."""
        return unpack(self.packed_weight)

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Takes over these weights, rounded to the format."""
        filled = pack(weight, self.format)
        self.packed.copy_(_as_integers(filled.weights))
        if self.scales is not None and filled.scales is not None:
            self.scales.copy_(_as_integers(filled.scales))

    def share_weights_of(self, other: Packed) -> None:
        """From now on these are the buffers of ``other``, which saves them."""
        self.register_buffer("packed", other.packed, persistent=False)
        self.register_buffer("scales", other.scales, persistent=False)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, {self.format}"


class PackedEmbedding(Packed):
    """Rows of a packed matrix; with tied weights it shares its buffers with the head."""

    @property
    def num_embeddings(self) -> int:
        return self.outputs

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_cpu and ids.numel() and not torch.compiler.is_compiling():
            low, high = ids.aminmax()
            if int(low) < 0 or int(high) >= self.outputs:  # the panels are padded with zeros, and -1 is the last row
                raise IndexError("index out of range in self")  # as nn.Embedding says it
        rows = unpack(self.packed_weight, ids.reshape(-1))
        return rows.view(*ids.shape, self.inputs)


class PackedLinear(Packed):
    def __init__(self, outputs: int, inputs: int, format: str, bias: bool, device: torch.device | str | None = None):
        super().__init__(outputs, inputs, format, device)
        self.bias = nn.Parameter(torch.zeros(outputs, device=device)) if bias else None
        self.shared: SharedInput
        SharedInput([self])

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_native(x):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        return self.shared.product(self, x)

    def _is_native(self, x: Tensor) -> bool:
        if x.numel() > MOST_ROWS * self.inputs or (torch.is_grad_enabled() and x.requires_grad) or not x.is_cpu:
            return False
        if torch.compiler.is_exporting() or why_unavailable() is not None:
            return False
        return torch.compiler.is_compiling() or in_plain_memory((x,))


class SharedInput:
    """Projections that are called with the same x, one after the other.

    The first call multiplies x with all of them at once and the others receive their part. It is the same x if it lies
    at the same address, is still held, and has not been written to since (its version). Without versions (inference
    mode) every projection multiplies alone.
    """

    def __init__(self, members: list[PackedLinear]):
        self.members = members
        self.products: dict[tuple[PackedLinear, ...], Product] = {}
        self.waiting: Outputs | None = None
        for member in members:
            member.shared = self

    def product(self, member: PackedLinear, x: Tensor) -> Tensor:
        if len(self.members) == 1 or x.is_inference() or not x.is_contiguous():
            y = self._product_of(member)(x.reshape(-1, member.inputs))
        else:
            y = self._part(member, x)
        return y.view(*x.shape[:-1], member.outputs).to(x.dtype)

    def _part(self, member: PackedLinear, x: Tensor) -> Tensor:
        outputs = self.waiting  # one read: another thread may put its own in this place
        if outputs is None or not outputs.is_of(x) or member not in outputs.parts:
            together = self._product_of(*self.members)
            y = together(x.view(-1, member.inputs))
            parts = {m: y[:, start : start + m.outputs] for m, start in zip(self.members, together.places)}
            outputs = self.waiting = Outputs(x, x._version, parts)
        part = outputs.parts.pop(member)
        if not outputs.parts and self.waiting is outputs:
            self.waiting = None
        return part

    def _product_of(self, *members: PackedLinear) -> Product:
        product = self.products.get(members)
        if product is None or product.addresses != [m.packed.data_ptr() for m in members]:
            if len(members) > 1:
                _lay_side_by_side(members)
            product = self.products[members] = Product([m.packed_weight for m in members], _joined_bias(members))
        return product

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model has memory of its own: what points into this one's is not copied."""
        return {"members": self.members, "products": {}, "waiting": None}


class Outputs(NamedTuple):
    """What one x gave, until every projection has taken its part."""

    x: Tensor
    """held, so that nothing else can have its address"""
    version: int
    parts: dict[PackedLinear, Tensor]

    def is_of(self, x: Tensor) -> bool:
        same_place = self.x.data_ptr() == x.data_ptr() and self.x.numel() == x.numel() and self.x.dtype == x.dtype
        return same_place and self.version == x._version


def _lay_side_by_side(members: tuple[PackedLinear, ...]) -> None:
    for member, packed in zip(members, side_by_side([m.packed for m in members])):
        member.packed = packed
    scales = [m.scales for m in members if m.scales is not None]
    for member, moved in zip(members, side_by_side(scales) if scales else ()):
        member.scales = moved


def _joined_bias(members: tuple[PackedLinear, ...]) -> Tensor | None:
    """The biases at the places of their outputs, zeros where there is none."""
    if all(m.bias is None for m in members):
        return None
    parts = [torch.zeros(m.outputs) if m.bias is None else m.bias.detach().float() for m in members]
    padded = [F.pad(part, (0, -len(part) % PANEL)) for part in parts[:-1]]
    return torch.cat([*padded, parts[-1]])


def _as_integers(x: Tensor) -> Tensor:
    integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return x.view(integers[x.dtype]) if x.is_floating_point() else x

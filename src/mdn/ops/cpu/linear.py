"""Products of few rows with a matrix of weights, for decoding on a CPU: activations and sums are float32.

``linear_of_rows`` takes float32 weights as torch keeps them. The others are packed:

| format | a weight is | bits per weight |
|---|---|---|
| ``bf16`` | rounded to bfloat16; exact for a bfloat16 checkpoint | 16 |
| ``int8`` | an integer from -127 to 127 times one float32 scale per output | 8 |
| ``int4`` | an integer from -8 to 7 times one bfloat16 scale per output and group of 32 inputs | 4.5 |

A decode step reads every weight once, so fewer bytes make it faster. The kernel is made for 1 to 16 rows of x;
it takes any number, but above ``MOST_ROWS`` torch's matrix product is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mdn.ops.cpu.bindings import Linear, call, optional_values, values
from mdn.ops.cpu.huge_pages import prefer_huge_pages
from mdn.ops.shared_checks import in_plain_memory

PANEL, GROUP = 16, 32
"""outputs that are packed together; inputs per scale of ``int4``, to a multiple of which all formats are padded"""
FORMATS = ("bf16", "int8", "int4")
"""in the order of MDN_BFLOAT16, MDN_INT8, MDN_INT4"""
FLOAT32 = 3
"""MDN_FLOAT32: not packed"""
MOST_ROWS = 48
"""rows of x up to which the kernel is faster than torch's float32 product"""
SMALL = 1 << 16
"""weights below which one thread is fastest"""


class PackedWeight(NamedTuple):
    """A weight matrix [outputs, inputs] as the kernel reads it (csrc/interface.h, ``MdnLinear``)."""

    format: str
    outputs: int
    inputs: int
    weights: Tensor
    """[panels, inputs / n, 16, n] with n = 2 bfloat16 or 4 int8; [panels, inputs / 8, 16, 4] uint8, two int4 each"""
    scales: Tensor | None
    """None; [panels, 16] float32 (int8); [panels, inputs / 32, 16] bfloat16 (int4)"""

    @property
    def padded_outputs(self) -> int:
        """Where the next matrix would begin."""
        return self.outputs + -self.outputs % PANEL


def pack(weight: Tensor, format: str) -> PackedWeight:
    """``weight`` [outputs, inputs], any float dtype, rounded to one of ``FORMATS``."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.is_cpu:
        given = f"{list(weight.shape)} {weight.dtype} on {weight.device}"
        raise ValueError(f"weight must be a floating-point CPU matrix [outputs, inputs], got {given}")
    outputs, inputs = weight.shape
    weight = weight.detach()
    padded = F.pad(weight, (0, -inputs % GROUP, 0, -outputs % PANEL))
    if not padded.isfinite().all():
        raise ValueError("weight must be finite to be packed")
    if format == "bf16":
        return PackedWeight(format, outputs, inputs, _interleaved(padded.bfloat16(), 2), None)
    padded = padded.float()
    if format == "int8":
        scales = padded.abs().amax(1) / 127
        integers = (padded / _nonzero(scales)[:, None]).round().to(torch.int8)
        return PackedWeight(format, outputs, inputs, _interleaved(integers, 4), scales.view(-1, PANEL))
    groups = padded.unflatten(1, (-1, GROUP))
    # The number of the largest magnitude becomes -8, whatever its sign: of the 16 integers only -8 has no counterpart.
    extremes = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    scales = (extremes / -8).bfloat16()
    integers = (groups / _nonzero(scales.float())[..., None]).round().clamp(-8, 7).to(torch.int16).flatten(1) & 15
    pairs = (integers[:, 0::2] | integers[:, 1::2] << 4).to(torch.uint8)
    by_panel = scales.view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()
    return PackedWeight(format, outputs, inputs, _interleaved(pairs, 4), by_panel)


def unpack(packed: PackedWeight, rows: Tensor | None = None) -> Tensor:
    """The weights [outputs, inputs] that the kernel computes with, float32; only these outputs if ``rows`` (int64)."""
    if rows is None:
        chosen = packed.weights.transpose(1, 2).flatten(2).flatten(0, 1)
    else:
        chosen = packed.weights[rows // PANEL, :, rows % PANEL].flatten(1)
    if packed.scales is None:
        weight = chosen.float()
    elif packed.format == "int8":
        weight = chosen.float() * _of_rows(packed.scales.view(-1), rows).unsqueeze(1)
    else:
        integers = torch.stack([chosen & 15, chosen >> 4], 2).flatten(1).to(torch.int8)
        signed = (integers ^ 8) - 8
        scales = _of_rows(packed.scales.transpose(1, 2).flatten(0, 1), rows).float()
        weight = (signed.float().unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)
    return weight[: packed.outputs, : packed.inputs] if rows is None else weight[:, : packed.inputs]


def _of_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def packed_like(outputs: int, inputs: int, format: str, device: torch.device | str | None = None) -> PackedWeight:
    """An uninitialised ``PackedWeight`` of these sizes."""
    panels, depth = -(-outputs // PANEL), inputs + -inputs % GROUP
    if format == "bf16":
        weights = torch.empty(panels, depth // 2, PANEL, 2, dtype=torch.bfloat16, device=device)
        return PackedWeight(format, outputs, inputs, weights, None)
    if format == "int8":
        weights = torch.empty(panels, depth // 4, PANEL, 4, dtype=torch.int8, device=device)
        return PackedWeight(
            format, outputs, inputs, weights, torch.empty(panels, PANEL, dtype=torch.float32, device=device)
        )
    weights = torch.empty(panels, depth // 8, PANEL, 4, dtype=torch.uint8, device=device)
    scales = torch.empty(panels, depth // GROUP, PANEL, dtype=torch.bfloat16, device=device)
    return PackedWeight(format, outputs, inputs, weights, scales)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., inputs] times the transposed weight, plus ``bias`` [outputs]: [..., outputs] in the dtype of x."""
    if x.dim() == 0 or x.shape[-1] != packed.inputs:
        raise ValueError(f"x must have {packed.inputs} inputs in its last dimension, got shape {list(x.shape)}")
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("packed weights have no backward pass: call linear under torch.no_grad() or detach x")
    y = Product([packed], bias)(x.reshape(-1, packed.inputs))
    return y.view(*x.shape[:-1], packed.outputs).to(x.dtype)


def linear_of_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [n, inputs], weight [outputs, inputs], bias [outputs] -> [n, outputs]; all float32 and contiguous."""
    outputs, inputs = weight.shape
    y = rows.new_empty(len(rows), outputs)
    struct = Linear(
        batch=len(rows),
        depth=inputs,
        outputs=outputs,
        format=FLOAT32,
        threads=1 if weight.numel() < SMALL else torch.get_num_threads(),
        weights=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        x=rows.data_ptr(),
        y=y.data_ptr(),
    )
    call("mdn_linear", struct)
    return y


class Product:
    """The product with one matrix, or with several at once that lie one behind the other in memory; checked and bound
    once, for many calls."""

    def __init__(self, matrices: list[PackedWeight], bias: Tensor | None = None):
        first, total = matrices[0], sum(m.padded_outputs for m in matrices)
        self.inputs, self.depth = first.inputs, first.inputs + -first.inputs % GROUP
        # Matrices start at a multiple of 16 outputs; what pads the last one is not computed.
        self.outputs = total - matrices[-1].padded_outputs + matrices[-1].outputs
        self.places = [sum(m.padded_outputs for m in matrices[:i]) for i in range(len(matrices))]
        self.addresses = [m.weights.data_ptr() for m in matrices]
        self.bias = optional_values("bias", bias, torch.float32, (self.outputs,))
        self.matrices = matrices  # keeps the memory
        prefer_huge_pages(*(m.weights for m in matrices))
        self.is_small = total * self.depth < SMALL
        struct = Linear(
            depth=self.depth,
            outputs=self.outputs,
            format=FORMATS.index(first.format),
            threads=1,
            weights=first.weights.data_ptr(),
            scales=None if first.scales is None else first.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
        )
        self.template = bytes(struct)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, inputs] -> [n, outputs], float32; matrix i has the columns from ``places[i]`` on."""
        if not in_plain_memory((rows,)):
            what = "tensor subclasses, tracers or torch.func"
            raise NotImplementedError(f"products with packed weights are native code, which cannot follow {what}")
        if self.depth != self.inputs:
            rows = F.pad(rows, (0, self.depth - self.inputs))
        rows = values("x", rows, torch.float32, (len(rows), self.depth))
        y = rows.new_empty(len(rows), self.outputs)
        struct = Linear.from_buffer_copy(self.template)
        struct.batch, struct.x, struct.y = len(rows), rows.data_ptr(), y.data_ptr()
        if not self.is_small:
            struct.threads = torch.get_num_threads()
        call("mdn_linear", struct)
        return y


def side_by_side(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors as views of one new piece of memory, one behind the other."""
    memory = torch.cat([x.reshape(-1) for x in tensors])
    parts = memory.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors)]


def _interleaved(rows: Tensor, n: int) -> Tensor:
    """[outputs, m] -> [panels, m / n, 16, n]: n neighbours of every output of a panel side by side."""
    return rows.view(-1, PANEL, rows.shape[1] // n, n).transpose(1, 2).contiguous()


def _nonzero(scales: Tensor) -> Tensor:
    """Scales to divide by: a scale of zero has only zeros to divide."""
    return torch.where(scales == 0, 1.0, scales)

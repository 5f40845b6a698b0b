"""Operands of instructions: registers, immediates and addresses, as functions that read and write all lanes.

Registers are fixed arrays, so an operand is looked up once, when an instruction is built, and not while it runs. A
source is a function without arguments that gives an array (or a number) seen as the type of the instruction; a target
is a function of (value, mask).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from mdn.bench.emulator.machine import (
    UNSIGNED,
    Fault,
    Lanes,
    Machine,
    Mask,
    bfloat16_to_float32,
    float32_to_bfloat16,
)
from mdn.bench.emulator.ptx import WIDTHS, Kernel, group

Source = Callable[[], Any]
Target = Callable[[Any, Mask], None]

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}


def dtype_of(kind: str) -> Any:
    """numpy's type for a PTX type that numpy has; packed and bfloat16 types are unsigned bits."""
    if kind in ("pred",):
        return np.bool_
    if kind.endswith("x2") or kind in ("bf16", "tf32") or kind[0] in "bu":
        return UNSIGNED[WIDTHS[kind]]
    return (SIGNED if kind[0] == "s" else FLOATS)[WIDTHS[kind]]


def is_float(kind: str) -> bool:
    return kind[0] == "f" or kind.startswith("bf")


def immediate(text: str, kind: str) -> Any:
    """A literal as a number of the type: ``0f3F800000`` is bits of a float32, others are integers."""
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        bits = int(text[2:], 16)
        return np.float32(struct.unpack("<f", struct.pack("<I", bits))[0]) if is_float(kind) else np.uint32(bits)
    if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
        bits = int(text[2:], 16)
        return np.float64(struct.unpack("<d", struct.pack("<Q", bits))[0]) if is_float(kind) else np.uint64(bits)
    value = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.bool_(value)
    if kind == "bf16":
        return bfloat16_to_float32(np.array([value], np.uint16))[0]
    unsigned = np.array([value & (1 << WIDTHS[kind]) - 1], UNSIGNED[WIDTHS[kind]])
    return unsigned.view(dtype_of(kind))[0]


class Operands:
    def __init__(self, kernel: Kernel, machine: Machine, special: dict[str, Lanes]):
        self.kernel, self.machine, self.special = kernel, machine, special
        self.registers: dict[str, Lanes] = {}

    def register(self, name: str) -> Lanes:
        """The array behind a register, unsigned (or boolean). Registers of 8 bits live in 16, as in PTX."""
        if name not in self.registers:
            bits = self.kernel.bits_of(name)
            kind = np.bool_ if bits == 1 else UNSIGNED[max(bits, 16)]
            self.registers[name] = np.zeros(self.machine.num_lanes, kind)
        return self.registers[name]

    def registers_of(self, operand: str) -> list[Lanes]:
        return [self.register(name) for name in group(operand)]

    def source(self, operand: str, kind: str) -> Source:
        if operand in self.special:
            value = self.special[operand]
            return lambda: value
        if operand in self.kernel.shared_symbols:
            return lambda: np.zeros(self.machine.num_lanes, UNSIGNED[WIDTHS[kind]])
        if re.fullmatch(r"-?\d.*", operand):
            number = immediate(operand, kind)
            return lambda: number
        bits = self.register(operand)
        if kind == "bf16":
            return lambda: bfloat16_to_float32(bits)
        if bits.dtype == np.bool_ or bits.itemsize * 8 == WIDTHS[kind]:
            view = bits if kind == "pred" else bits.view(dtype_of(kind))
            return lambda: view
        narrow, wanted = UNSIGNED[WIDTHS[kind]], dtype_of(kind)
        return lambda: bits.astype(narrow).view(wanted)

    def target(self, operand: str, kind: str) -> Target:
        if operand == "_":
            return lambda value, mask: None
        bits = self.register(operand)
        if kind == "bf16":
            return lambda value, mask: np.copyto(bits, float32_to_bfloat16(value), where=mask)
        wider = bits.dtype != np.bool_ and bits.itemsize * 8 > WIDTHS[kind]  # sign or zero extension
        view = (
            bits.view((SIGNED if kind[0] == "s" else UNSIGNED)[bits.itemsize * 8])
            if wider
            else bits.view(dtype_of(kind))
        )
        return lambda value, mask: np.copyto(view, value, where=mask, casting="unsafe")

    def lanes(self, operand: str, kind: str) -> Callable[[], Lanes]:
        """A source as a full array, also where it is a number."""
        get, wanted = self.source(operand, kind), dtype_of(kind)
        count = self.machine.num_lanes
        return lambda: np.broadcast_to(np.asarray(get(), wanted), (count,))

    def address(self, operand: str) -> Callable[[], Lanes]:
        """``[%rd1 + 16]``"""
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if found is None:
            raise Fault(f"cannot read the address {operand}")
        name, offset = found[1], int(found[2] or 0)
        if name in self.kernel.shared_symbols:
            return lambda: np.full(self.machine.num_lanes, offset, np.int64)
        base = self.register(name)
        return (lambda: base) if offset == 0 else (lambda: base.astype(np.int64) + offset)

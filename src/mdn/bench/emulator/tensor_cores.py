"""Warp-wide matrix instructions: ldmatrix, stmatrix, mma.sync, and Hopper's wgmma with shared-memory descriptors.

Fragments (PTX ISA, 9.7.14): in every 8 x 8 tile of 16-bit elements lane l holds row l / 4, columns 2 (l % 4) and
2 (l % 4) + 1, packed into one 32-bit register; in an 8 x 4 tile of tf32, row l / 4, column l % 4. Because lanes run
along rows, the tiles of all warps are a plain reshape of the register: ``[warps, 8, 8]``.

Operands are exact in float32 (tf32 drops the low 13 bits, as the hardware does); sums are float32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdn.bench.emulator.machine import Fault, Lanes, Machine, Mask, active, bfloat16_to_float32

LANE = np.arange(32)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)  # of a lane in an 8 x 8 tile
SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # bits 62-63 of a descriptor


def as_float32(raw: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """Elements as they lie in memory or registers, unsigned, to numbers."""
    if kind == "bf16":
        return bfloat16_to_float32(raw)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)  # tf32


def tile(register: Lanes, kind: str) -> NDArray[np.float32]:
    """[warps, 8, 8] of 16-bit elements, [warps, 8, 4] of tf32."""
    if kind == "tf32":
        return as_float32(register, kind).reshape(-1, 8, 4)
    return as_float32(register.view(np.uint16), kind).reshape(-1, 8, 8)


def left_operand(registers: list[Lanes], kind: str) -> NDArray[np.float32]:
    """[warps, 16, k]: tiles (rows 0-7, rows 8-15) of the first half of k, then of the second."""
    tiles = [tile(register, kind) for register in registers]
    halves = [np.concatenate(tiles[i : i + 2], axis=1) for i in range(0, len(tiles), 2)]
    return np.concatenate(halves, axis=2)


class TensorCores:
    """Matrix instructions of one machine."""

    def __init__(self, machine: Machine):
        self.machine = machine
        groups = machine.num_lanes // 128
        self._queues = [[ProductGroup()] for _ in range(groups)]  # per warp group, oldest first; the last is open
        self._late: dict[int, LateSum] = {}  # by id of the register

    # ---------------------------------------------------------------- 8 x 8 matrices of 16-bit elements

    def load_matrices(self, registers: list[Lanes], addresses: Lanes, transposed: bool, mask: Mask, where: str) -> None:
        """ldmatrix: lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i."""
        rows = self._matrix_rows(len(registers), addresses, mask, where, "load")
        shared = self.machine.shared.view(np.uint16)
        for i, register in enumerate(registers):
            of_matrix = rows[:, 8 * i : 8 * i + 8] // 2
            if transposed:
                low, high = shared[of_matrix[:, PAIR] + ROW], shared[of_matrix[:, PAIR + 1] + ROW]
            else:
                low, high = shared[of_matrix[:, ROW] + PAIR], shared[of_matrix[:, ROW] + PAIR + 1]
            value = low.astype(np.uint32) | high.astype(np.uint32) << 16
            np.copyto(register, value.ravel(), where=mask)

    def store_matrices(
        self, addresses: Lanes, registers: list[Lanes], transposed: bool, mask: Mask, where: str
    ) -> None:
        rows = self._matrix_rows(len(registers), addresses, mask, where, "store")
        warps = slice(None) if mask is True else mask.reshape(-1, 32)[:, 0]
        shared = self.machine.shared.view(np.uint16)
        for i, register in enumerate(registers):
            of_matrix, value = rows[warps, 8 * i : 8 * i + 8] // 2, register.reshape(-1, 32)[warps]
            if transposed:
                first, second = of_matrix[:, PAIR] + ROW, of_matrix[:, PAIR + 1] + ROW
            else:
                first, second = of_matrix[:, ROW] + PAIR, of_matrix[:, ROW] + PAIR + 1
            shared[first], shared[second] = value & 0xFFFF, value >> 16

    def _matrix_rows(self, matrices: int, addresses: Lanes, mask: Mask, where: str, kind: str) -> NDArray[np.int64]:
        """[warps, 32] offsets of 16-byte rows; those of inactive warps are zero."""
        machine = self.machine
        machine.require_whole_warps(mask, where)
        lanes = active((machine.lane_in_warp < 8 * matrices) & mask, machine.every_lane)
        rows = np.zeros(machine.num_lanes, np.int64)
        rows[lanes] = machine.shared_offsets(addresses, lanes, 16, where, kind)
        if machine.races:
            access = machine.races.read if kind == "load" else machine.races.write
            access(rows[lanes], lanes, 16, where)
        return rows.reshape(-1, 32)

    # ---------------------------------------------------------------- mma.sync

    def multiply(
        self, kind: str, d: list[Lanes], a: list[Lanes], b: list[Lanes], c: list[Lanes], mask: Mask, where: str
    ) -> None:
        """m16n8kN: D [16, 8] = A [16, k] B [k, 8] + C. Lane l of D holds rows l / 4 and l / 4 + 8, two columns each."""
        self.machine.require_whole_warps(mask, where)
        right = np.concatenate([tile(register, kind) for register in b], axis=2)  # B^T: [warps, 8, k]
        product = left_operand(a, kind) @ right.transpose(0, 2, 1)
        by_lane = product.reshape(-1, 2, 32, 2)  # [warps, row half, lane, column of the pair]
        for r in range(4):
            value = by_lane[:, r // 2, :, r % 2].ravel() + c[r].view(np.float32)
            np.copyto(d[r].view(np.float32), value, where=mask)

    # ---------------------------------------------------------------- wgmma

    def multiply_async(self, product: WgmmaOperands, mask: Mask, where: str) -> None:
        """m64nNkK of each warp group. The sums arrive at ``wait``; until then the registers hold NaN."""
        machine = self.machine
        machine.require_whole_warps(mask, where)
        groups = machine.num_lanes // 128
        chosen = np.ones(groups, bool) if mask is True else mask.reshape(groups, 128)[:, 0]
        k = 8 if product.kind == "tf32" else 16
        if isinstance(product.a, list):
            left = left_operand(product.a, product.kind).reshape(groups, 64, k)
        else:
            left = self._by_descriptor(product.a, 64, k, product.kind, product.a_transposed, chosen, where)
        right = self._by_descriptor(product.b, product.n, k, product.kind, product.b_transposed, chosen, where)
        sums = product.sign * (left @ right.transpose(0, 2, 1))  # [groups, 64, n]
        by_lane = sums.reshape(groups, 4, 2, 8, product.n // 8, 4, 2)  # warp, row half, row, column block, pair, column
        for r, register in enumerate(product.d):
            value = by_lane[:, :, r // 2 % 2, :, r // 4, :, r % 2].reshape(-1)
            late = self._late.setdefault(id(register), LateSum(register))
            late.add(value, product.accumulate(), mask)
            for g in np.flatnonzero(chosen):
                self._queues[g][-1].registers.add(id(register))

    def commit(self, mask: Mask) -> None:
        for g in self._groups(mask):
            self._queues[g].append(ProductGroup())

    def wait(self, pending: int, mask: Mask) -> None:
        for g in self._groups(mask):
            queue, lanes = self._queues[g], slice(g * 128, (g + 1) * 128)
            while len(queue) - 1 > pending:
                oldest = queue.pop(0)
                later = set().union(*(group.registers for group in queue))
                for register in oldest.registers - later:
                    self._late[register].deliver(lanes)
                if self.machine.races:
                    for granules in oldest.granules:
                        self.machine.races.release(granules, g)

    def _groups(self, mask: Mask) -> list[int]:
        groups = self.machine.num_lanes // 128
        return [g for g in range(groups) if mask is True or mask[g * 128]]

    def _by_descriptor(
        self, descriptors: Lanes, rows: int, k: int, kind: str, transposed: bool, chosen: NDArray[np.bool_], where: str
    ) -> NDArray[np.float32]:
        """[groups, rows, k] from shared memory; rows are M of A or N of B."""
        by_group = descriptors.reshape(-1, 128)
        if (by_group[chosen] != by_group[chosen][:, :1]).any():
            raise Fault(f"{where}: the descriptor differs inside a warp group")
        size = 4 if kind == "tf32" else 2
        cells = self.machine.shared.view(np.uint32 if size == 4 else np.uint16)
        out = np.zeros((len(by_group), rows, k), np.float32)
        for g in map(int, np.flatnonzero(chosen)):
            offsets = descriptor_offsets(int(by_group[g, 0]), rows, k, size, transposed, where)
            if offsets.min() < 0 or offsets.max() + size > self.machine.shared_bytes:
                raise Fault(f"{where}: the descriptor reads outside of shared memory")
            offsets = offsets + self.machine.cta_start[g * 128]
            if self.machine.races:
                granules = self.machine.races.read_by_wgmma(offsets.ravel(), g, size, where)
                self._queues[g][-1].granules.append(granules)
            out[g] = as_float32(cells[offsets // size], kind)
        return out


@dataclass
class WgmmaOperands:
    kind: str  # of A and B: bf16, f16 or tf32
    n: int
    d: list[Lanes]  # n / 2 registers
    a: list[Lanes] | Lanes  # fragments, or descriptors
    b: Lanes  # descriptors
    accumulate: Any  # () -> lanes: add to D, or overwrite it
    sign: int  # product of scale-a and scale-b
    a_transposed: bool
    b_transposed: bool


@dataclass
class ProductGroup:
    """What the wgmmas between two commits write and read."""

    registers: set[int] = field(default_factory=set)
    granules: list[NDArray[Any]] = field(default_factory=list)


class LateSum:
    """A register whose new value has been computed and not yet been waited for."""

    def __init__(self, register: Lanes):
        self.register = register
        self.value = np.zeros_like(register)
        self.pending = np.zeros(len(register), bool)

    def add(self, product: Lanes, accumulate: Lanes, mask: Mask) -> None:
        before = np.where(self.pending, self.value, self.register).view(np.float32)
        value = product + np.where(accumulate, before, np.float32(0))
        np.copyto(self.value.view(np.float32), value, where=mask)
        np.copyto(self.register, np.uint32(0xFFFFFFFF), where=mask)
        self.pending |= mask

    def deliver(self, lanes: slice) -> None:
        self.register[lanes] = np.where(self.pending[lanes], self.value[lanes], self.register[lanes])
        self.pending[lanes] = False


def descriptor_offsets(
    descriptor: int, rows: int, k: int, size: int, transposed: bool, where: str
) -> NDArray[np.int64]:
    """[rows, k] byte offsets that a wgmma matrix descriptor addresses (PTX ISA, 9.7.15.5).

    The matrix lies in atoms of 8 lines of ``width`` bytes. K-major: a line is a row, the next 8 rows follow at the
    stride offset, the next part of k at the leading offset. MN-major (transposed): a line is a k, lines run along rows;
    the next part of the rows is at the leading offset, the next 8 k at the stride offset. The swizzle exchanges the
    16-byte units of a line by the number of the line.
    """
    if descriptor >> 49 & 7:
        raise Fault(f"{where}: a base offset in a descriptor is not emulated")
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = SWIZZLE_BYTES[descriptor >> 62]
    row, column, per_line = np.arange(rows)[:, None], np.arange(k)[None, :], width // size
    if transposed:
        along = row // per_line * leading + row % per_line * size
        across = column // 8 * stride + column % 8 * width
    else:
        along = column // per_line * leading + column % per_line * size
        across = row // 8 * stride + row % 8 * width
    offsets = start + along + across
    return offsets ^ ((offsets >> 7 & (width // 16 - 1)) << 4)


def wgmma_shape(instruction_parts: tuple[str, ...]) -> str:
    """m64nNkK"""
    return next(part for part in instruction_parts if part.startswith("m64"))


def wgmma_columns(instruction_parts: tuple[str, ...]) -> int:
    """n of m64nNkK."""
    found = re.search(r"n(\d+)k", wgmma_shape(instruction_parts))
    assert found is not None
    return int(found[1])


class RegisterOrder:
    """Whether ``wgmma.fence`` orders the registers of every wgmma (PTX ISA, 9.7.15.7.1).

    The accumulators, and A if it is in registers, need one between an access by any other instruction and the wgmma,
    and before the first wgmma. Accumulators that the last wgmma of the same shape has added to need none.
    """

    FENCED, TOUCHED = 0, -1

    def __init__(self, registers: int, machine: Machine):
        self.machine = machine
        # Numbers from 1 are shapes: a wgmma of that shape has added to the register since the last fence.
        self._state = np.full((registers, machine.num_lanes // 32), self.TOUCHED, np.int16)
        self._shapes: dict[str, int] = {}

    def touch(self, registers: Lanes, mask: Mask) -> None:
        """An instruction other than wgmma reads or writes these."""
        self._state[self._cells(registers, mask)] = self.TOUCHED

    def fence(self, mask: Mask) -> None:
        self._state[self._cells(np.arange(len(self._state)), mask)] = self.FENCED

    def multiply(self, sums: Lanes, left: Lanes, shape: str, mask: Mask, where: str) -> None:
        """A wgmma adds to ``sums`` and takes A from ``left`` (empty if it lies in shared memory)."""
        races = self.machine.races
        if races is None:
            return
        number = self._shapes.setdefault(shape, len(self._shapes) + 1)
        accumulators, operands = self._cells(sums, mask), self._cells(left, mask)
        unordered = (self._state[accumulators] != self.FENCED) & (self._state[accumulators] != number)
        races.report(unordered, "wgmma adds to registers that no wgmma.fence has followed", where)
        unordered = self._state[operands] != self.FENCED
        races.report(unordered, "wgmma reads registers that no wgmma.fence has followed", where)
        self._state[accumulators] = number

    @staticmethod
    def _cells(registers: Lanes, mask: Mask) -> Any:
        """Index of the registers' states in the warps that take part."""
        if mask is True:
            return registers
        return np.ix_(registers, np.flatnonzero(mask.reshape(-1, 32).any(1)))

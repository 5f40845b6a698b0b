"""PTX instructions as functions on all lanes: ``Builder.build(instruction)(mask)`` executes it."""

from __future__ import annotations

import re
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
from mdn.bench.emulator.operands import FLOATS, Operands, dtype_of, is_float
from mdn.bench.emulator.ptx import WIDTHS, Instruction, Kernel, group
from mdn.bench.emulator.tensor_cores import RegisterOrder, TensorCores, WgmmaOperands, wgmma_columns, wgmma_shape

Run = Callable[[Mask], None]

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax}
INTEGER: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}
INTEGER |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "abs": np.abs,
    "neg": np.negative,
}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
COMPARISONS |= {"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
ATOMICS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
NOTHING = ("membar", "griddepcontrol", "fence.acq_rel", "fence.sc", "nop")
"""without effect here: they order accesses of different CTAs, which must not meet at all"""


class Builder(Operands):
    """Turns instructions into functions of the mask of active lanes."""

    def __init__(self, kernel: Kernel, machine: Machine, special: dict[str, Lanes]):
        super().__init__(kernel, machine, special)
        products = [x for block in kernel.blocks for x in block if x.opcode.startswith("wgmma.mma_async")]
        groups = [operand for x in products for operand in x.operands[:2] if operand.startswith("{")]  # D, maybe A
        names = dict.fromkeys(name for operand in groups for name in group(operand))
        self._wgmma_registers = {name: number for number, name in enumerate(names)} if machine.check else {}
        """the registers that need wgmma.fence, if races are looked for"""

    def start(self, parameters: dict[str, Lanes]) -> None:
        """Forget what an earlier run left behind. ``parameters``: one value each, in the bits of its type."""
        self.parameters = parameters
        self.tensor_cores = TensorCores(self.machine)
        self.order = RegisterOrder(len(self._wgmma_registers), self.machine)

    def build(self, instruction: Instruction) -> Run:
        make = getattr(self, f"_{instruction.name}", None)
        if instruction.opcode.startswith(NOTHING):
            run: Run = lambda mask: None  # noqa: E731
        elif make is not None:
            run = make(instruction)
        else:
            run = self._elementwise(instruction)
        touched = self._wgmma_rows(*instruction.operands)
        if len(touched) and instruction.name != "wgmma":
            run = self._touching(run, touched)
        if instruction.guard is None:
            return run
        guard = self.register(instruction.guard)
        if instruction.negated:
            return lambda mask: run(~guard & mask)
        return lambda mask: run(guard & mask)

    def _wgmma_rows(self, *operands: str) -> Lanes:
        """The numbers of those registers in the operands that some wgmma adds to or takes A from."""
        names = {name for operand in operands for name in re.findall(r"%\w+", operand)}
        return np.array([self._wgmma_registers[name] for name in names if name in self._wgmma_registers], np.int64)

    def _touching(self, run: Run, rows: Lanes) -> Run:
        def run_and_note(mask: Mask) -> None:
            run(mask)
            self.order.touch(rows, mask)

        return run_and_note

    def _elementwise(self, ins: Instruction) -> Run:
        """Instructions that numpy has: arithmetic, bit operations, functions of one number."""
        name, kind = ins.name, ins.kind
        if kind.endswith("x2"):
            return self._packed(ins, ARITHMETIC[name])
        if name in FUNCTIONS and (is_float(kind) or name in ("abs", "neg")):
            return self._apply(ins, FUNCTIONS[name], kind)
        if is_float(kind) and name in ARITHMETIC:
            return self._apply(ins, ARITHMETIC[name], kind)
        if name in INTEGER:
            return self._apply(ins, INTEGER[name], kind)
        raise Fault(f"{ins} is not emulated")

    def _apply(self, ins: Instruction, function: Callable[..., Any], kind: str, to: str | None = None) -> Run:
        put, sources = self.target(ins.operands[0], to or kind), [self.source(x, kind) for x in ins.operands[1:]]
        return lambda mask: put(function(*(get() for get in sources)), mask)

    def _packed(self, ins: Instruction, function: Callable[..., Any]) -> Run:
        """Two numbers in one register: bf16x2, f16x2 in 32 bits, f32x2 in 64."""
        target, *sources = (self.register(name) for name in ins.operands)
        kind = ins.kind.removesuffix("x2")

        def halves(bits: Lanes) -> Any:
            pairs = bits.view(UNSIGNED[WIDTHS[kind]])
            return bfloat16_to_float32(pairs) if kind == "bf16" else pairs.view(FLOATS[WIDTHS[kind]]).astype(np.float32)

        def run(mask: Mask) -> None:
            value = function(*(halves(bits) for bits in sources))
            packed = float32_to_bfloat16(value) if kind == "bf16" else value.astype(FLOATS[WIDTHS[kind]])
            np.copyto(target, packed.view(target.dtype), where=mask)

        return run

    # Bits ------------------------------------------------------------

    def _mov(self, ins: Instruction) -> Run:
        target, source = ins.operands
        if target.startswith("{"):  # take apart; an unused part is written as _
            kind = f"u{WIDTHS[ins.kind] // len(group(target))}"
            puts = [self.target(part, kind) for part in group(target)]
            pieces = self.register(source).view(dtype_of(kind)).reshape(-1, len(puts))

            def split(mask: Mask) -> None:
                for i, put in enumerate(puts):
                    put(pieces[:, i], mask)

            return split
        if source.startswith("{"):  # put together
            whole, kind = self.register(target), f"u{WIDTHS[ins.kind] // len(group(source))}"
            gets = [self.lanes(part, kind) for part in group(source)]
            return lambda mask: np.copyto(
                whole, np.stack([get() for get in gets], axis=1).view(whole.dtype).ravel(), where=mask
            )
        return self._apply(ins, lambda x: x, ins.kind)

    _cvta = _mov

    def _not(self, ins: Instruction) -> Run:
        return self._apply(ins, np.invert, ins.kind)

    def _shl(self, ins: Instruction) -> Run:
        """Shifts by the width or more give zero (or the sign), which numpy leaves undefined."""
        put, value = self.target(ins.operands[0], ins.kind), self.source(ins.operands[1], ins.kind)
        by, width = self.source(ins.operands[2], "u32"), WIDTHS[ins.kind]
        shift = np.left_shift if ins.name == "shl" else np.right_shift
        dtype, arithmetic = dtype_of(ins.kind), ins.name == "shr" and ins.kind[0] == "s"

        def run(mask: Mask) -> None:
            amount, x = np.asarray(by()), np.asarray(value(), dtype)
            inside = shift(x, np.minimum(amount, width - 1).astype(dtype))
            put(inside if arithmetic else np.where(amount < width, inside, dtype(0)), mask)

        return run

    _shr = _shl

    def _bfe(self, ins: Instruction) -> Run:
        """Bit field extract, sign-extended for signed types; position and length are immediates in Triton's code."""
        first, length, width = int(ins.operands[2], 0), int(ins.operands[3], 0), WIDTHS[ins.kind]
        put, value = self.target(ins.operands[0], ins.kind), self.source(ins.operands[1], ins.kind)
        return lambda mask: put((value() << (width - first - length)) >> (width - length), mask)

    def _bfi(self, ins: Instruction) -> Run:
        first, length, width = int(ins.operands[3], 0), int(ins.operands[4], 0), WIDTHS[ins.kind]
        field = ((1 << length) - 1) << first
        kept = field ^ ((1 << width) - 1)
        put = self.target(ins.operands[0], ins.kind)
        a, b = self.source(ins.operands[1], ins.kind), self.source(ins.operands[2], ins.kind)
        dtype = dtype_of(ins.kind)
        return lambda mask: put((b() & dtype(kept)) | ((a() << dtype(first)) & dtype(field)), mask)

    def _prmt(self, ins: Instruction) -> Run:
        """Byte permute: each selector nibble picks one of the eight bytes of (a, b); its top bit replicates a sign."""
        put = self.target(ins.operands[0], "b32")
        a, b = self.lanes(ins.operands[1], "u32"), self.lanes(ins.operands[2], "u32")
        selector, nibbles = self.lanes(ins.operands[3], "u32"), np.arange(0, 16, 4, dtype=np.uint32)

        def run(mask: Mask) -> None:
            bytes_of = np.stack([a(), b()], axis=1).view(np.uint8)  # [lanes, 8]
            picks = selector()[:, None] >> nibbles & np.uint32(15)  # [lanes, 4]
            chosen = np.take_along_axis(bytes_of, (picks & 7).astype(np.int64), axis=1)
            signs = np.where(chosen >> 7, np.uint8(0xFF), np.uint8(0))
            result = np.where(picks >> 3 != 0, signs, chosen)
            put(np.ascontiguousarray(result).view(np.uint32).ravel(), mask)

        return run

    def _lop3(self, ins: Instruction) -> Run:
        """Any function of three bits, given as its truth table."""
        put, table = self.target(ins.operands[0], "b32"), int(ins.operands[4], 0)
        gets = [self.lanes(operand, "u32") for operand in ins.operands[1:4]]

        def run(mask: Mask) -> None:
            a, b, c = (get() for get in gets)
            result = np.zeros(self.machine.num_lanes, np.uint32)
            for row in range(8):
                if table >> row & 1:
                    result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            put(result, mask)

        return run

    def _shf(self, ins: Instruction) -> Run:
        """Funnel shift of the 64 bits (high, low); .wrap takes the amount modulo 32."""
        put = self.target(ins.operands[0], "b32")
        low, high, by = (self.lanes(operand, "u32") for operand in ins.operands[1:4])
        left = ins.parts[1] == "l"

        def run(mask: Mask) -> None:
            both, amount = low().astype(np.uint64) | high().astype(np.uint64) << np.uint64(32), by() & np.uint32(31)
            amount = amount.astype(np.uint64)
            put((both << amount) >> np.uint64(32) if left else both >> amount, mask)

        return run

    # Numbers ---------------------------------------------------------

    def _mul(self, ins: Instruction) -> Run:
        kind, width = ins.kind, WIDTHS[ins.kind]
        if is_float(kind):
            return self._packed(ins, np.multiply) if kind.endswith("x2") else self._apply(ins, np.multiply, kind)
        if "wide" in ins.parts:
            wide = dtype_of(f"{kind[0]}{2 * width}")
            return self._apply(ins, lambda a, b: np.multiply(a, b, dtype=wide), kind, f"{kind[0]}{2 * width}")
        if "hi" in ins.parts:
            double = object if width == 64 else dtype_of(f"{kind[0]}{2 * width}")
            return self._apply(
                ins, lambda a, b: (np.asarray(a).astype(double) * np.asarray(b).astype(double)) >> width, kind
            )
        return self._apply(ins, np.multiply, kind)

    def _mad(self, ins: Instruction) -> Run:
        kind = ins.kind
        wide = f"{kind[0]}{2 * WIDTHS[kind]}" if "wide" in ins.parts else kind
        put, dtype = self.target(ins.operands[0], wide), dtype_of(wide)
        a, b = self.source(ins.operands[1], kind), self.source(ins.operands[2], kind)
        c = self.source(ins.operands[3], wide)
        return lambda mask: put(np.multiply(a(), b(), dtype=dtype) + c(), mask)

    def _fma(self, ins: Instruction) -> Run:
        """One rounding: the product of two float32 is exact in float64 (rounding twice differs in 1 of 2^29 cases)."""
        fused = lambda a, b, c: np.multiply(a, b, dtype=np.float64) + c  # noqa: E731
        return self._packed(ins, fused) if ins.kind.endswith("x2") else self._apply(ins, fused, ins.kind)

    def _div(self, ins: Instruction) -> Run:
        if is_float(ins.kind):
            return self._apply(ins, np.divide, ins.kind)
        return self._apply(ins, lambda a, b: (a - np.fmod(a, b)) // b, ins.kind)  # towards zero

    def _rem(self, ins: Instruction) -> Run:
        return self._apply(ins, np.fmod, ins.kind)

    def _setp(self, ins: Instruction) -> Run:
        put, compare, kind = self.target(ins.operands[0], "pred"), ins.parts[1], ins.kind
        a, b = self.source(ins.operands[1], kind), self.source(ins.operands[2], kind)
        if not is_float(kind):
            function = COMPARISONS[compare]
            return lambda mask: put(function(a(), b()), mask)
        # Comparisons of floats are false if a number is NaN; those that end in u are true then.
        unordered = lambda: np.isnan(a()) | np.isnan(b())  # noqa: E731
        if compare in ("nan", "num"):
            return lambda mask: put(unordered() if compare == "nan" else ~unordered(), mask)
        if compare.endswith("u") and compare[:-1] in COMPARISONS:
            function = COMPARISONS[compare[:-1]]
            return lambda mask: put(function(a(), b()) | unordered(), mask)
        function = COMPARISONS[compare]
        return lambda mask: put(function(a(), b()) & ~unordered(), mask)

    def _selp(self, ins: Instruction) -> Run:
        bits = f"b{WIDTHS[ins.kind]}"
        put, a, b = (
            self.target(ins.operands[0], bits),
            self.source(ins.operands[1], bits),
            self.source(ins.operands[2], bits),
        )
        choose = self.register(ins.operands[3])
        return lambda mask: put(np.where(choose, a(), b()), mask)

    def _cvt(self, ins: Instruction) -> Run:
        to, kind = ins.parts[-2:]
        if to in ("bf16x2", "f16x2"):
            return self._cvt_pair(ins, to)
        if to == "tf32":  # round to nearest, ties away from zero: 10 bits of mantissa are left
            put, bits = self.target(ins.operands[0], "b32"), self.source(ins.operands[1], "b32")
            return lambda mask: put((bits() + np.uint32(0x1000)) & np.uint32(0xFFFFE000), mask)
        rounding = next((ROUNDINGS[part] for part in ins.parts if part in ROUNDINGS), None)
        if rounding is not None:
            return self._apply(ins, rounding, kind, to)
        return self._apply(ins, lambda x: x, kind, to)

    def _cvt_pair(self, ins: Instruction, to: str) -> Run:
        """Two float32 to the halves of one register; the first operand becomes the upper half."""
        target = self.register(ins.operands[0])
        high, low = self.lanes(ins.operands[1], "f32"), self.lanes(ins.operands[2], "f32")

        def run(mask: Mask) -> None:
            pairs = np.stack([low(), high()], axis=1)
            packed = float32_to_bfloat16(pairs) if to == "bf16x2" else pairs.astype(np.float16)
            np.copyto(target, packed.view(np.uint32).ravel(), where=mask)

        return run

    # Memory ----------------------------------------------------------

    def _ld(self, ins: Instruction) -> Run:
        if "param" in ins.parts:
            put, name, wanted = self.target(ins.operands[0], ins.kind), ins.operands[1].strip("[] "), dtype_of(ins.kind)
            return lambda mask: put(self.parameters[name].view(wanted)[0], mask)
        space, address, where = space_of(ins), self.address(ins.operands[1]), place_of(ins)
        machine, registers = self.machine, self.registers_of(ins.operands[0])
        if WIDTHS[ins.kind] != 8:
            return lambda mask: machine.load(space, address(), registers, mask, where)
        puts = [self.target(name, ins.kind) for name in group(ins.operands[0])]

        def run(mask: Mask) -> None:
            values = [np.zeros(machine.num_lanes, dtype_of(ins.kind)) for _ in puts]
            machine.load(space, address(), values, mask, where)
            for put, value in zip(puts, values):
                put(value, mask)

        return run

    def _st(self, ins: Instruction) -> Run:
        space, address, where = space_of(ins), self.address(ins.operands[0]), place_of(ins)
        values = [self.lanes(name, f"u{WIDTHS[ins.kind]}") for name in group(ins.operands[1])]
        return lambda mask: self.machine.store(space, address(), [value() for value in values], mask, where)

    def _createpolicy(self, ins: Instruction) -> Run:
        """A hint to the L2 cache for loads that name it. There is no cache here: any number will do."""
        put = self.target(ins.operands[0], ins.kind)
        return lambda mask: put(0, mask)

    def _atom(self, ins: Instruction) -> Run:
        operation = ATOMICS[next(part for part in ins.parts if part in ATOMICS)]
        space, where, returns = space_of(ins), place_of(ins), ins.name == "atom"
        operands = ins.operands if returns else ("_", *ins.operands)
        put, address = self.target(operands[0], ins.kind), self.address(operands[1])
        value = self.lanes(operands[2], ins.kind)
        return lambda mask: put(self.machine.atomic(space, operation, address(), value(), mask, where), mask)

    _red = _atom

    def _cp(self, ins: Instruction) -> Run:
        machine, where = self.machine, place_of(ins)
        if "commit_group" in ins.parts:
            return machine.commit_copies
        if "wait_group" in ins.parts:
            pending = int(ins.operands[0])
            return lambda mask: machine.wait_for_copies(pending, mask)
        if "wait_all" in ins.parts:

            def wait_for_all(mask: Mask) -> None:
                machine.commit_copies(mask)
                machine.wait_for_copies(0, mask)

            return wait_for_all
        target, source, width = self.address(ins.operands[0]), self.address(ins.operands[1]), int(ins.operands[2], 0)
        kept = self.lanes(ins.operands[3] if len(ins.operands) > 3 else ins.operands[2], "u32")
        return lambda mask: machine.copy_async(target(), source(), width, kept(), mask, where)

    # Warps and tensor cores ------------------------------------------

    def _bar(self, ins: Instruction) -> Run:
        """bar.warp.sync; barriers of the CTA end a block and are handled where blocks are run."""
        machine = self.machine

        def run(mask: Mask) -> None:
            for detector in machine.detectors():
                detector.warp_barrier(np.any(np.broadcast_to(mask, machine.num_lanes).reshape(-1, 32), axis=1))

        return run

    def _fence(self, ins: Instruction) -> Run:
        machine = self.machine

        def run(mask: Mask) -> None:
            if machine.races and "proxy" in ins.parts:
                machine.races.proxy_fence(np.broadcast_to(mask, machine.num_lanes))

        return run

    def _shfl(self, ins: Instruction) -> Run:
        target, _, predicate = ins.operands[0].partition("|")
        put, put_range = self.target(target, "b32"), self.target(predicate or "_", "pred")
        value, b, c = self.lanes(ins.operands[1], "u32"), self.lanes(ins.operands[2], "u32"), int(ins.operands[3], 0)
        mode, where = ins.parts[2], place_of(ins)

        def run(mask: Mask) -> None:
            result, in_range = self.machine.shuffle(mode, value(), b(), c, mask, where)
            put(result, mask)
            put_range(in_range, mask)

        return run

    def _redux(self, ins: Instruction) -> Run:
        """Combine one number of every lane of a warp; in Triton's code the mask of lanes is the whole warp."""
        put, value = self.target(ins.operands[0], ins.kind), self.lanes(ins.operands[1], ins.kind)
        combine, where = INTEGER[ins.parts[2]], place_of(ins)

        def run(mask: Mask) -> None:
            self.machine.require_whole_warps(mask, where)
            put(np.repeat(combine.reduce(value().reshape(-1, 32), axis=1), 32), mask)

        return run

    def _ldmatrix(self, ins: Instruction) -> Run:
        registers, address, where = self.registers_of(ins.operands[0]), self.address(ins.operands[1]), place_of(ins)
        transposed = "trans" in ins.parts
        return lambda mask: self.tensor_cores.load_matrices(registers, address(), transposed, mask, where)

    def _stmatrix(self, ins: Instruction) -> Run:
        registers, address, where = self.registers_of(ins.operands[1]), self.address(ins.operands[0]), place_of(ins)
        transposed = "trans" in ins.parts
        return lambda mask: self.tensor_cores.store_matrices(address(), registers, transposed, mask, where)

    def _mma(self, ins: Instruction) -> Run:
        d, a, b, c = (self.registers_of(operand) for operand in ins.operands[:4])
        kind, where = ins.parts[-3], place_of(ins)
        return lambda mask: self.tensor_cores.multiply(kind, d, a, b, c, mask, where)

    def _wgmma(self, ins: Instruction) -> Run:
        if "commit_group" in ins.parts:
            return lambda mask: self.tensor_cores.commit(mask)
        if "wait_group" in ins.parts:
            pending = int(ins.operands[0])
            return lambda mask: self.tensor_cores.wait(pending, mask)
        if "fence" in ins.parts:
            return lambda mask: self.order.fence(mask)
        d, a, b, accumulate, *rest = ins.operands
        signs, transposed = [int(x) for x in rest[:2]], [bool(int(x)) for x in rest[2:]]
        a_in_registers = a.startswith("{")
        product = WgmmaOperands(
            kind=ins.kind,
            n=wgmma_columns(ins.parts),
            d=self.registers_of(d),
            a=self.registers_of(a) if a_in_registers else self.register(a),
            b=self.register(b),
            accumulate=self.lanes(accumulate, "pred"),
            sign=signs[0] * signs[1],
            # With A in registers only B can be transposed; tf32 has no transposed form.
            a_transposed=transposed[0] if len(transposed) == 2 else False,
            b_transposed=transposed[-1] if transposed else False,
        )
        where, shape = place_of(ins), wgmma_shape(ins.parts)
        sums, left = self._wgmma_rows(d), self._wgmma_rows(a if a_in_registers else "")

        def run(mask: Mask) -> None:
            self.order.multiply(sums, left, shape, mask, where)
            self.tensor_cores.multiply_async(product, mask, where)

        return run


def space_of(ins: Instruction) -> str:
    return "shared" if "shared" in ins.parts else "global"


def place_of(ins: Instruction) -> str:
    return f"{ins.place} {ins.opcode}"

"""A static timeline of one warp, read off NVIDIA machine code: an estimate, not a measurement.

ptxas writes into every instruction how many cycles to wait before the next one (its stall count) and on which of six
scoreboards it waits and signals. `walk` follows the code from its entry to its exit and adds these up, with an assumed
latency for everything that signals through a scoreboard (LATENCY). Warps of a block are taken as balanced, and nothing
else runs on the SM. Loops with constant bounds are followed as often as they turn: their counters are evaluated on the
way. A loop whose bound is not known is followed four times; of a loop over a sequence's chunks the last turn counts.
Code behind `if x != 0.0:` of a float is for numbers that are not finite, and is not followed.

Weak points: cache hits (all global loads cost the same), barriers and fences (a constant each), other warps, and
asynchronous copies: a wait for them costs nothing here, `copies_in_flight` says how much time they have.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass, field, replace

# Cycles from issue until the result is there. Global loads: between a hit in the L2 cache and DRAM, as on an H100.
LATENCY = {"LDG": 600, "ATOM": 600, "LDGSTS": 30, "LDS": 29, "LDSM": 33, "STS": 25, "STSM": 30, "SHFL": 25, "MUFU": 22}
LATENCY |= {"S2R": 25, "LDC": 25, "R2UR": 12, "LDL": 40, "STL": 20, "STG": 20, "IMAD": 6}
OTHER_LATENCY = 20
OPERANDS_READ = 12  # until an instruction that signals "operands read" has read them
BARRIER = 25
FENCE = 30
HGMMA_DRAIN = 30
UNKNOWN_TURNS = 4
LONGEST_WALK = 400_000


@dataclass(frozen=True)
class Instruction:
    """One machine instruction and what its control bits say."""

    text: str
    predicate: str | None
    name: str
    operands: tuple[str, ...]
    stall: int
    signals: int | None
    """scoreboard that is set until the result is there"""
    signals_read: int | None
    """scoreboard that is set until the operands were read"""
    waits: tuple[int, ...]

    @property
    def family(self) -> str:
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel and, for every label, the instruction it stands before."""

    instructions: list[Instruction]
    labels: dict[str, int]


@dataclass
class Timeline:
    """What `walk` found."""

    cycles: float = 0.0
    """from entry to exit"""
    issued: int = 0
    """instructions of one warp"""
    barriers: int = 0
    copies_in_flight: int = 0
    """the most groups of asynchronous copies that may still be on their way at a wait in the loop"""
    loads_after_a_wait: int = 0
    """global loads that were issued after the first wait for a global load"""
    waiting: Counter[str] = field(default_factory=Counter)
    """cycles spent waiting, by what is waited for"""
    bytes_moved: int = 0
    """between a warp and the caches of global memory, if all lanes take part"""
    flops: int = 0
    """of a warp's tensor-core instructions"""
    turn: Timeline | None = None
    """the last turn of the longest loop whose bound is not known, if there is one"""

    def __sub__(self, began: Timeline) -> Timeline:
        return Timeline(
            self.cycles - began.cycles,
            self.issued - began.issued,
            self.barriers - began.barriers,
            self.copies_in_flight,
            self.loads_after_a_wait - began.loads_after_a_wait,
            self.waiting - began.waiting,
            self.bytes_moved - began.bytes_moved,
            self.flops - began.flops,
        )


def parse(disassembly: str) -> Code:
    """The output of `nvdisasm -c -hex`: two 64-bit words per instruction, the control bits in the second."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    text: str | None = None
    for line in disassembly.splitlines():
        if label := re.match(r"^(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif first := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/", line):
            text = first[1].strip()
        elif (second := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*$", line)) and text is not None:
            instructions.append(_instruction(text, int(second[1], 16)))
            text = None
    return Code(instructions, labels)


def _instruction(text: str, control: int) -> Instruction:
    found = re.match(r"(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*)", text)
    assert found is not None
    signals, signals_read = (control >> 46) & 7, (control >> 49) & 7
    return Instruction(
        text=text,
        predicate=found[1],
        name=found[2],
        operands=tuple(part.strip() for part in found[3].split(",")),
        stall=max((control >> 41) & 15, 1),
        signals=None if signals == 7 else signals,
        signals_read=None if signals_read == 7 else signals_read,
        waits=tuple(board for board in range(6) if (control >> 52) >> board & 1),
    )


class Values:
    """Registers and predicates whose values are known: enough to follow the counters of loops."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {"RZ": 0, "URZ": 0, "PT": 1, "UPT": 1, "SRZ": 0}

    def get(self, operand: str) -> int | None:
        operand = operand.removesuffix(".reuse")
        if operand.startswith("!"):
            value = self.get(operand[1:])
            return None if value is None else 1 - value
        if re.fullmatch(r"-?0x[0-9a-f]+", operand):
            return int(operand, 16) & 0xFFFFFFFF
        return self.known.get(operand)

    def set(self, operand: str, value: int | None) -> None:
        if operand in ("RZ", "URZ", "PT", "UPT"):
            return
        if value is None:
            self.known.pop(operand, None)
        else:
            self.known[operand] = value

    def forget_written(self, instruction: Instruction) -> None:
        """Everything an instruction may write: its first operand, and predicates that follow it (carries)."""
        first, *others = instruction.operands
        for operand in (first, *others[: 1 if first[:1] == "P" or first[:2] == "UP" else 2]):
            if not re.fullmatch(r"U?P\d+", operand):
                break
            self.set(operand, None)
        if found := re.fullmatch(r"(U?R)(\d+)", first):
            wide = 4 if instruction.family.endswith("MMA") or ".128" in instruction.name else 1
            wide = 2 if ".64" in instruction.name or ".WIDE" in instruction.name else wide
            for offset in range(wide):
                self.set(f"{found[1]}{int(found[2]) + offset}", None)
            for operand in others[:2]:
                if not re.fullmatch(r"U?P\d+", operand):
                    break
                self.set(operand, None)

    def execute(self, instruction: Instruction) -> None:
        """Update what is known; an instruction that is not understood makes its results unknown."""
        name, ops = instruction.name, instruction.operands
        values = [self.get(operand) for operand in ops]
        skipped = 1 if instruction.predicate is None else self.get(instruction.predicate)
        if skipped == 0:
            return
        before = dict(self.known)
        self.forget_written(instruction)
        if skipped is None:
            return
        if name in ("MOV", "UMOV", "IMAD.MOV.U32", "CS2R", "CS2R.32"):
            self.set(ops[0], values[-1])
            if name == "CS2R" and values[-1] == 0:
                self.set(f"R{int(ops[0][1:]) + 1}", 0)
        elif name == "HFMA2.MMA" and ops[1:3] in (("-RZ", "RZ"),):
            halves = [_half_bits(operand) for operand in ops[3:5]]
            self.set(ops[0], None if None in halves else (halves[0] or 0) << 16 | (halves[1] or 0))
        elif name in ("SEL", "USEL") and values[3] is not None:
            self.set(ops[0], values[1] if values[3] else values[2])
        elif name == "PLOP3.LUT" and None not in values[2:6]:
            a, b, c, table = (value or 0 for value in values[2:6])
            self.set(ops[0], table >> (a << 2 | b << 1 | c) & 1)
        elif name == "IMAD.X" and None not in values[1:5]:
            a, b, c, carry = (value or 0 for value in values[1:5])
            self.set(ops[0], (a * b + c + carry) & 0xFFFFFFFF)
        elif re.fullmatch(r"U?IADD3(\.X)?|VIADD", name):
            self._add(name, ops, before)
        elif re.match(r"U?ISETP", name):
            self.set(ops[0], self._compare(name, ops, before))
        elif name in ("FSETP.NEU.AND", "FSETP.EQ.OR") and ops[3] == "RZ":
            self.set(ops[0], int(name == "FSETP.EQ.OR"))

    def _add(self, name: str, ops: tuple[str, ...], before: dict[str, int]) -> None:
        look = Values()
        look.known = before
        carries = [operand for operand in ops[1:] if re.fullmatch(r"!?U?P\w+", operand)]
        terms = [look.get(operand) for operand in ops[1:] if operand not in carries]
        carry_out = [operand for operand in carries if re.fullmatch(r"U?P\d+", operand)] if ".X" not in name else []
        carry_in = [look.get(operand) for operand in carries] if ".X" in name else []
        if None in terms or None in carry_in:
            return
        total = sum(term or 0 for term in terms) + sum(carry or 0 for carry in carry_in)
        self.set(ops[0], total & 0xFFFFFFFF)
        if carry_out:
            self.set(carry_out[0], total >> 32 & 1)

    def _compare(self, name: str, ops: tuple[str, ...], before: dict[str, int]) -> int | None:
        look = Values()
        look.known = before
        a, b, also = look.get(ops[2]), look.get(ops[3]), look.get(ops[4])
        if a is None or b is None or also is None or ".AND" not in name:
            return None
        if ".U32" not in name:
            a, b = (value - (1 << 32) if value >> 31 else value for value in (a, b))
        how = name.split(".")[1]
        result = {"LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": a != b}.get(how)
        if result is None:
            return None
        if ".EX" in name:
            lower = look.get(ops[5])
            if lower is None:
                return None
            if a == b:
                result = bool(lower)
        return int(result and also)


def _half_bits(operand: str) -> int | None:
    """The bits of a float16 immediate: how ptxas writes small integers."""
    try:
        return struct.unpack("<H", struct.pack("<e", float(operand)))[0]
    except (ValueError, OverflowError):
        return None


def _hgmma_cycles(instruction: Instruction) -> float:
    """How long a warp group's matrix instruction keeps the tensor cores or their shared-memory port busy."""
    found = re.search(r"64x(\d+)x(\d+)\.F32", instruction.name)
    if found is None:
        return 0.0
    wide = "TF32" in instruction.name
    work = 64 * int(found[1]) * int(found[2]) * 2 / (2048 if wide else 4096)
    from_shared = "gdesc" in instruction.operands[1]
    return max(work, 64 * int(found[2]) * (4 if wide else 2) / 128 if from_shared else 0.0)


def _bytes_moved(instruction: Instruction) -> int:
    """Of one warp, if all lanes take part."""
    if instruction.family not in ("LDG", "STG", "LDGSTS"):
        return 0
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1}
    return 32 * next((width for name, width in widths.items() if name in instruction.name.split(".")), 4)


def _flops(instruction: Instruction) -> int:
    """Of one warp; a warp group's instruction belongs to four."""
    if instruction.family == "HGMMA":
        found = re.search(r"64x(\d+)x(\d+)\.F32", instruction.name)
        return 0 if found is None else 2 * 16 * int(found[1]) * int(found[2])
    found = re.search(r"HMMA\.(16)(8)(8|16)\b", instruction.name)
    return 0 if found is None else 2 * int(found[1]) * int(found[2]) * int(found[3])


def jump_target(code: Code, at: int) -> int | None:
    """Where an instruction jumps to, if it is a jump."""
    instruction = code.instructions[at]
    if instruction.family not in ("BRA", "CALL"):
        return None
    return code.labels.get(instruction.text[instruction.text.rfind("(") + 1 : instruction.text.rfind(")")])


@dataclass
class Walk:
    """The state of a walk: the time, what is waited for, and the loops whose bounds are not known."""

    code: Code
    values: Values = field(default_factory=Values)
    total: Timeline = field(default_factory=Timeline)
    now: float = 0.0
    ready: list[float] = field(default_factory=lambda: [0.0] * 6)
    source: list[str] = field(default_factory=lambda: [""] * 6)
    products_free: float = 0.0
    turns: Counter[int] = field(default_factory=Counter)
    marks: dict[int, Timeline] = field(default_factory=dict)
    """where a turn of a loop over chunks began, by its closing jump"""
    unknown_ways_out: set[int] = field(default_factory=set)
    turn: Timeline | None = None
    """the last turn of the longest loop over chunks"""

    def wait_until(self, then: float, what: str) -> None:
        if then > self.now:
            self.total.waiting[what] += round(then - self.now)
            self.now = then

    def issue(self, instruction: Instruction) -> None:
        """Wait for what it needs, start it, and wait for the next issue slot."""
        for board in instruction.waits:
            self.wait_until(self.ready[board], self.source[board])
        family = instruction.family
        if family == "LDG" and self.total.waiting["LDG"]:
            self.total.loads_after_a_wait += 1
        if instruction.name.startswith("WARPGROUP.DEPBAR"):
            self.wait_until(self.products_free + HGMMA_DRAIN, "HGMMA")
        elif family == "HGMMA":
            self.products_free = max(self.now, self.products_free) + _hgmma_cycles(instruction)
        elif family == "BAR":
            self.total.barriers += 1
            self.now += BARRIER
        elif family == "MEMBAR":
            self.now += FENCE
        elif family == "DEPBAR" and len(instruction.operands) > 1:
            allowed = self.values.get(instruction.operands[-1]) or 0
            self.total.copies_in_flight = max(self.total.copies_in_flight, allowed)
        signals = (
            (instruction.signals_read, OPERANDS_READ, f"operands of {family}"),
            (instruction.signals, LATENCY.get(family, OTHER_LATENCY), family),
        )
        for signalled, latency, what in signals:
            if signalled is not None and self.now + latency >= self.ready[signalled]:
                self.ready[signalled], self.source[signalled] = self.now + latency, what
        self.now += instruction.stall
        self.total.issued += 1
        self.total.bytes_moved += _bytes_moved(instruction)
        self.total.flops += _flops(instruction)
        self.values.execute(instruction)

    def close_turn(self, at: int) -> None:
        """Note the turn that ends with the jump at this place."""
        self.turns[at] += 1
        here = replace(self.total, cycles=self.now, waiting=Counter(self.total.waiting))
        began = self.marks.get(at)
        self.marks[at] = here
        if began is not None and (self.turn is None or here.issued - began.issued >= self.turn.issued):
            self.turn = here - began

    def takes(self, at: int, target: int) -> bool:
        """Whether a jump is taken. Conditions that are not known are those of loops over chunks, and of parts that are
        skipped when there are no chunks."""
        predicate = self.code.instructions[at].predicate
        known = 1 if predicate is None else self.values.get(predicate)
        if target <= at:
            over_chunks = any(target <= way_out < at for way_out in self.unknown_ways_out)
            if known is None or over_chunks:
                self.close_turn(at)
                return predicate is None or self.turns[at] < UNKNOWN_TURNS
            return bool(known)
        if known is not None:
            return bool(known)
        loops = [b for b in range(at + 1, target) if (jump_target(self.code, b) or b + 1) <= b]
        closing = [b for b in loops if (jump_target(self.code, b) or 0) <= at]
        if closing:  # the way out of a loop
            self.unknown_ways_out.add(at)
            return self.turns[closing[-1]] >= UNKNOWN_TURNS
        if loops:
            return False
        skips_over = jump_target(self.code, target - 1)
        return skips_over is not None and skips_over > target and self.code.instructions[target - 1].predicate is None

    def exits(self, at: int) -> bool:
        """Whether a program ends here. An unknown condition ends a loop, or guards against too many programs."""
        predicate = self.code.instructions[at].predicate
        known = 1 if predicate is None else self.values.get(predicate)
        if known is not None:
            return bool(known)
        later = range(at + 1, len(self.code.instructions))
        closing = next((b for b in later if (jump_target(self.code, b) or b + 1) <= at), None)
        if closing is None:
            return False
        self.unknown_ways_out.add(at)
        return self.turns[closing] >= UNKNOWN_TURNS


def walk(code: Code) -> Timeline:
    """Follow one warp from the entry to the exit."""
    current, at = Walk(code), 0
    while at < len(code.instructions) and current.total.issued < LONGEST_WALK:
        instruction = code.instructions[at]
        current.issue(instruction)
        if instruction.family == "EXIT" and current.exits(at):
            break
        target = jump_target(code, at)
        at = target if target is not None and current.takes(at, target) else at + 1
    current.total.cycles, current.total.turn = current.now, current.turn
    return current.total

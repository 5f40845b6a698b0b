"""PTX text of one kernel to basic blocks.

Triton emits one statement per line or inline assembly with several; guards are ``@%p1`` or ``@!%p1``. A block ends at a
branch and also at a CTA barrier, where lanes may have to wait. ``.loc`` lines give every instruction its place in the
Triton source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

WIDTHS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "tf32": 32, "f32x2": 64, "bf16": 16}
WIDTHS |= {f"{letter}{bits}": bits for letter in "busf" for bits in (8, 16, 32, 64)}
"""bits of every type that an instruction or a register can have"""

LEAVES = ("bra", "ret", "exit", "trap")
CTA_BARRIERS = ("bar.sync", "barrier.sync", "barrier.cta.sync")


@dataclass(frozen=True)
class Instruction:
    opcode: str  # "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    operands: tuple[str, ...]
    guard: str | None  # a predicate register
    negated: bool
    place: str  # "prepare.py:93"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(re.split(r"\.|::", self.opcode))

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def kind(self) -> str:
        """The last part: for most instructions the type of the operands."""
        return self.parts[-1]

    @property
    def is_cta_barrier(self) -> bool:
        return self.opcode.startswith(CTA_BARRIERS)

    @property
    def ends_block(self) -> bool:
        return self.name in LEAVES or self.is_cta_barrier

    def __str__(self) -> str:
        guard = "" if self.guard is None else f"@{'!' * self.negated}{self.guard} "
        return f"{guard}{self.opcode} {', '.join(self.operands)} ({self.place})"


@dataclass
class Kernel:
    name: str
    parameters: list[tuple[str, str]]  # (name, type)
    registers: dict[str, int]  # prefix or full name -> bits: {"%r": 32, "%rd": 64}
    shared_symbols: set[str]  # all begin at offset 0 of the block's dynamic shared memory
    threads: int
    blocks: list[list[Instruction]]
    labels: dict[str, int]  # -> index of a block

    def bits_of(self, register: str) -> int:
        return self.registers.get(register) or self.registers[register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", text, re.DOTALL)
    if head is None:
        raise ValueError("the PTX has no .entry")
    body = text[head.end() :]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", body)
    if threads is None:
        raise ValueError("the PTX names no number of threads")
    kernel = Kernel(
        name=head[1],
        parameters=[
            (name, kind) for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head[2].strip())
        ],
        registers=_registers(body),
        shared_symbols=set(re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[", text)),
        threads=int(threads[1]),
        blocks=[[]],
        labels={},
    )
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(.*?)"', text, re.MULTILINE))
    _read_body(kernel, body[body.index("{") + 1 :], files)
    return kernel


def _registers(body: str) -> dict[str, int]:
    """``.reg .b32 %r<57>;`` declares a prefix; a register of inline assembly is declared by its full name."""
    found = re.findall(r"\.reg\s+\.(\w+)\s+([%\w$, <>]+);", body)
    return {re.sub(r"<\d+>", "", name.strip()): WIDTHS[kind] for kind, names in found for name in names.split(",")}


def _read_body(kernel: Kernel, body: str, files: dict[str, str]) -> None:
    targets = set(re.findall(r"\bbra(?:\.uni)?\s+([$\w]+)", body))
    place, depth, pending = "?", 0, ""
    for raw in body.splitlines():
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", raw)
        if location:
            place = f"{files.get(location[1], '?').split('/')[-1]}:{location[2]}"
            continue
        line = re.sub(r"//.*", "", raw).strip()
        label = re.match(r"([$\w]+):\s*(.*)", line)
        if label:
            line = label[2]
            if label[1] in targets:  # other labels only mark debug information
                _start_block(kernel)
                kernel.labels[label[1]] = len(kernel.blocks) - 1
        pending = f"{pending} {line}".strip()
        while pending:
            if pending[0] in "{}":  # scopes of inline assembly, and the end of the kernel
                depth += 1 if pending[0] == "{" else -1
                pending = pending[1:].strip()
                if depth < 0:
                    return
            elif ";" in pending:
                statement, pending = (part.strip() for part in pending.split(";", 1))
                if statement and not statement.startswith("."):
                    _add(kernel, statement, place)
            else:
                break


def _start_block(kernel: Kernel) -> None:
    if kernel.blocks[-1]:
        kernel.blocks.append([])


def _add(kernel: Kernel, statement: str, place: str) -> None:
    found = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
    if found is None:
        raise ValueError(f"cannot read the PTX statement {statement!r} ({place})")
    negated, guard, opcode, operands = found.groups()
    instruction = Instruction(opcode, _split(operands), guard, negated == "!", place)
    kernel.blocks[-1].append(instruction)
    if instruction.ends_block:
        kernel.blocks.append([])


def _split(operands: str) -> tuple[str, ...]:
    """At commas outside braces and brackets: ``{%r1, %r2}, [%rd3 + 16]`` is two operands."""
    return tuple(part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands) if part.strip())


def group(operand: str) -> list[str]:
    """The members of ``{a, b, c}``; a plain operand is a group of one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]

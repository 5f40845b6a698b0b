"""Compiles recorded launches for absent GPUs and reads their resources off the machine code.

Needs Triton with its bundled NVIDIA tools, no GPU, and TRITON_INTERPRET unset. Compiling goes through Triton's own
launch path with a stand-in for the device driver, so the code is what a launch on that GPU would build: argument types,
alignments and constants are found by Triton from the very arguments.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mdn.bench.kernels import Variant, record_launches
from mdn.ops.triton.availability import interpreting
from mdn.ops.triton.host import Launch

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SCANS = ("forward_states", "rebuild_states", "backward_states")
"""kernels that walk along a sequence: their cycles and barriers are those of one chunk"""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers a thread, spilled and shared bytes, machine instructions."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class AbsentDevice:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels per device: one device per target.
        return str(self.target)

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextlib.contextmanager
def absent_device(target: str) -> Iterator[None]:
    """Let Triton believe that the current device is this GPU; nothing can run on it."""
    before = driver._active
    driver.set_active(AbsentDevice(TARGETS[target]))
    try:
        yield
    finally:
        driver._active = before


def build(launch: Launch, target: str) -> Any:
    """Build the kernel with the very arguments it was launched with."""
    with absent_device(target):
        return launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options)


def compile_launch(launch: Launch, target: str) -> Resources:
    """The resources of a launch."""
    return read_resources(build(launch, target), target)


def read_resources(compiled: Any, target: str) -> Resources:
    read = read_nvidia if TARGETS[target].backend == "cuda" else read_amd
    return read(compiled)


def compile_variant(variant: Variant, target: str) -> Iterator[dict[str, Any]]:
    """One row per launch: name, pass, target, K, V, dtype, tile, its resources and, on sm_80 and sm_90, its static
    timeline."""
    from mdn.bench.emulator.launch import tile_of
    from mdn.bench.gpu.estimate import GPUS, analyse

    if interpreting():
        raise ValueError("TRITON_INTERPRET must not be 1 here: the interpreter compiles nothing")
    for which, launches in record_launches(variant, target).items():
        for launch in launches:
            row = {"name": launch.name, "pass": which, "target": target, "K": variant.key_dim, "V": variant.value_dim}
            row["dtype"] = str(variant.dtype).removeprefix("torch.")
            compiled = build(launch, target)
            tile = tile_of(compiled, launch.arguments)
            if target in GPUS:
                found, scan = analyse(compiled), launch.name in SCANS
                yield row | tile | found.resources.as_dict() | found.as_dict(GPUS[target], scan, tile["columns"])
            else:
                yield row | tile | read_resources(compiled, target).as_dict()


def machine_code(compiled: Any) -> str:
    """The disassembly with control bits, for `mdn.bench.gpu.timeline`."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        return _output(NVIDIA_TOOLS / "nvdisasm", "-c", "-hex", cubin)


def read_nvidia(compiled: Any) -> Resources:
    """Registers from the cubin's resource table, spills and instruction count from its disassembly."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(NVIDIA_TOOLS / "cuobjdump", "-res-usage", cubin)
        code = _output(NVIDIA_TOOLS / "nvdisasm", "-c", cubin)
    found = re.search(r"REG:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump reported no registers for {compiled.metadata.name}")
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code)
    return Resources(
        registers=int(found[1]),
        spill_bytes=sum(_stored_bytes(name) for name in instructions if name.startswith("STL")),
        shared_bytes=compiled.metadata.shared,
        instructions=len([name for name in instructions if name != "NOP"]),
    )


def _stored_bytes(instruction: str) -> int:
    """Bytes a thread that a store to local memory writes: STL.128, STL.64, STL, STL.U16, STL.U8."""
    widths = Counter(instruction.split("."))
    return next((size for name, size in (("128", 16), ("64", 8), ("U16", 2), ("U8", 1)) if widths[name]), 4)


def read_amd(compiled: Any) -> Resources:
    """The same from the metadata and text of the assembly; spills are the scratch bytes of a thread."""
    assembly = compiled.asm["amdgcn"]

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    names = re.findall(r"^\s+([a-z]+)_[a-z0-9_]+", assembly, re.MULTILINE)
    return Resources(
        registers=metadata("vgpr_count"),
        spill_bytes=metadata("private_segment_fixed_size"),
        shared_bytes=compiled.metadata.shared,
        instructions=len([name for name in names if name in ("v", "s", "ds", "global", "buffer", "flat", "scratch")]),
    )


def _output(tool: Path, *arguments: str | Path) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout

"""Stands in for a GPU: compiles Triton launches for a target and runs their PTX on CPU tensors.

Launches of ``mdn.ops.triton`` go through one function that can be intercepted. For other packages ``replace_triton``
patches Triton's own launch method, so that for example FLA's kernels can be counted beside ours.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from mdn.bench.emulator.execute import Counts, Program
from mdn.bench.emulator.machine import GlobalMemory, HostBuffer
from mdn.bench.emulator.ptx import parse
from mdn.bench.emulator.races import Check

Edit = Callable[[str, str], str]
SCALARS: dict[str, Any] = {
    "i1": np.uint8,
    "i8": np.int8,
    "u8": np.uint8,
    "i16": np.int16,
    "u16": np.uint16,
    "i32": np.int32,
}
SCALARS |= {"u32": np.uint32, "i64": np.int64, "u64": np.uint64, "fp32": np.float32, "fp64": np.float64}
SHARED_LIMITS = {80: 166_912, 86: 101_376, 90: 232_448, 120: 101_376}
"""bytes of shared memory that a block may request"""


class EmulatedGPU:
    """``check`` looks for races (about twice the time), ``count`` for memory traffic; both add up over launches.
    ``check="exhaustive"`` tests the race detectors themselves."""

    def __init__(self, target: str = "sm_80", check: Check = False, count: bool = False, edit: Edit | None = None):
        """``edit(kernel name, PTX)`` may change the code before it runs: for tests that remove a barrier."""
        self.target, self.check, self.count, self.edit = target, check, count, edit
        self._programs: dict[int, tuple[Any, Program]] = {}  # the compiled kernel is kept alive: its id is the key

    @property
    def races(self) -> Counter[str]:
        return sum((program.races for _, program in self._programs.values()), Counter())

    @property
    def counts(self) -> dict[str, list[Counts]]:
        """By name of the kernel: one entry per compiled variant."""
        found: dict[str, list[Counts]] = {}
        for _, program in self._programs.values():
            found.setdefault(program.kernel.name, []).append(program.counts)
        return found

    def run(self, compiled: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """``compiled``: what Triton's ``warmup`` returns; ``arguments``: all of the kernel's, by name."""
        if id(compiled) not in self._programs:
            text = compiled.asm["ptx"]
            kernel = parse(text if self.edit is None else self.edit(compiled.metadata.name, text))
            program = Program(kernel, compiled.metadata.shared, self.check, self.count)
            program.counts.tile = tile_of(compiled, arguments)
            self._programs[id(compiled)] = compiled, program
        program = self._programs[id(compiled)][1]
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        memory = GlobalMemory(host_buffers(tensors))
        parameters = [
            _bits(arguments[name], kind, memory)
            for name, kind in compiled.src.signature.items()
            if kind != "constexpr" and arguments[name] is not None
        ]
        scratch = len(program.kernel.parameters) - len(parameters)  # Triton appends pointers that our kernels never use
        program.run(grid, parameters + [np.zeros(1, np.uint64)] * scratch, memory)
        memory.copy_back()

    @contextlib.contextmanager
    def emulate(self) -> Iterator[EmulatedGPU]:
        """Inside the block, kernels of ``mdn.ops.triton`` are compiled for the target and emulated."""
        from mdn.bench.gpu.compiling import absent_device
        from mdn.ops.triton.availability import emulation
        from mdn.ops.triton.host import Launch, intercept_launches
        from mdn.ops.triton.tiles import assume_target

        def run(launch: Launch) -> None:
            with absent_device(self.target):
                compiled = launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options)
            self.run(compiled, launch.grid, launch.arguments)

        with emulation(), assume_target(self.target), intercept_launches(run):
            yield self


def tile_of(compiled: Any, arguments: dict[str, Any]) -> dict[str, int | None]:
    """V columns of a program (None if the kernel does not say), warps and pipeline stages."""
    metadata = compiled.metadata
    return {"columns": arguments.get("BV"), "warps": metadata.num_warps, "stages": metadata.num_stages}


def _bits(value: Any, kind: str, memory: GlobalMemory) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        return np.array([memory.device_address(value.data_ptr())], np.uint64)
    return np.array([value], SCALARS[kind])


def host_buffers(tensors: list[Tensor]) -> list[HostBuffer]:
    """One buffer per storage. Only the bytes from the first to the last element of a given tensor may be touched."""
    buffers: dict[int, HostBuffer] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in buffers:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            buffers[storage.data_ptr()] = HostBuffer(storage.data_ptr(), data, [])
        if tensor.numel():
            last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride()))
            first = int(tensor.storage_offset()) * tensor.element_size()
            buffers[storage.data_ptr()].spans.append((first, first + (last + 1) * tensor.element_size()))
    return list(buffers.values())


@contextlib.contextmanager
def replace_triton(gpu: EmulatedGPU) -> Iterator[None]:
    """Inside the block every Triton launch of any package is emulated; of an autotuner's list the first entry is used.

    Import the package inside the block if it looks at the device while it is imported.
    """
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    capability = int(gpu.target.removeprefix("sm_"))
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            named = {name: value for name, value in kwargs.items() if name in self.arg_names}
            bound = self.signature.bind_partial(*args, **named)
            bound.apply_defaults()
            size = grid(dict(bound.arguments)) if callable(grid) else grid
            gpu.run(compiled, tuple(int(n) for n in size), dict(bound.arguments))
        return compiled

    def first_entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args))
        options = self.prune_configs(kwargs)[0].all_kwargs()
        return self.fn.run(*args, **kwargs, **options)

    before = driver._active
    driver.set_active(_StandIn(capability))
    try:
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(Autotuner, "run", first_entry),
            mock.patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)),
            mock.patch("torch.cuda.get_device_name", return_value=f"emulated {gpu.target}"),
            mock.patch("torch.cuda.device_count", return_value=1),
        ):
            yield
    finally:
        driver._active = before


class _StandIn:
    """The part of a Triton driver that compiling, and packages that ask about the device, use."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target, self.capability, self.utils = GPUTarget("cuda", capability, 32), capability, self

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels per device: one device per target

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMITS[self.capability], "multiprocessor_count": 108}

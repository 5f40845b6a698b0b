"""Hand-written PTX for the emulator's own tests: a body between loads of inputs and stores of results."""

from __future__ import annotations

import numpy as np

from mdn.bench.emulator.execute import Program
from mdn.bench.emulator.machine import GlobalMemory, HostBuffer
from mdn.bench.emulator.ptx import parse

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry case(.param .u64 .ptr .global .align 1 case_param_0, .param .u64 .ptr .global .align 1 case_param_1)
.reqntid {threads}
{{
  .reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<200>; .reg .b64 %rd<40>;
  ld.param.b64 %rd1, [case_param_0];
  ld.param.b64 %rd2, [case_param_1];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, {in_bytes};
  add.s64 %rd4, %rd1, %rd3;
  mul.wide.u32 %rd5, %r1, {out_bytes};
  add.s64 %rd6, %rd2, %rd5;
  {body}
  ret;
}}
"""


def buffer(x: np.ndarray) -> HostBuffer:
    data = x.reshape(-1).view(np.uint8)
    return HostBuffer(x.ctypes.data, data, [(0, len(data))])


def run(
    body: str,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    threads: int = 32,
    shared_bytes: int = 0,
    check: bool = False,
    count: bool = False,
    grid: tuple[int, ...] = (1,),
) -> Program:
    """In ``body`` %r1 is the thread; %rd4 and %rd6 point at the thread's row of inputs and outputs [threads, n]."""
    text = TEXT.format(body=body, threads=threads, in_bytes=inputs.strides[0], out_bytes=outputs.strides[0])
    program = Program(parse(text), shared_bytes, check=check, count=count)
    memory = GlobalMemory([buffer(inputs), buffer(outputs)])
    addresses = [np.array([memory.device_address(x.ctypes.data)], np.uint64) for x in (inputs, outputs)]
    program.run(grid, addresses, memory)
    memory.copy_back()
    return program


def on_words(body: str, *operands, result=np.uint32) -> np.ndarray:
    """Operands (32 values of 32 bits each) in %r10, %r11, ...; the result is what ``body`` leaves in %r20."""
    inputs = np.stack([np.ascontiguousarray(x).view(np.uint32) for x in operands], axis=1)
    outputs = np.zeros((32, 1), np.uint32)
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd4 + {4 * i}];\n" for i in range(inputs.shape[1]))
    run(loads + body + "\nst.global.b32 [%rd6], %r20;", np.ascontiguousarray(inputs), outputs)
    return outputs[:, 0].view(result)

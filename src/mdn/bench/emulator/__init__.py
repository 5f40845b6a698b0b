"""Executes compiled Triton kernels without a GPU: an emulator of the PTX that Triton emits, in Python and numpy.

    gpu = EmulatedGPU("sm_80", check=True)
    with gpu.emulate():                       # launches of mdn.ops.triton run here, on CPU tensors
        o, state = chunk_momentum_delta_rule(q, k, v, log_alpha, log_mu, backend="triton")
    gpu.races                                 # {} if no barrier, wait or fence is missing

| module | what |
|---|---|
| ``ptx`` | PTX text to basic blocks |
| ``machine`` | lanes, registers, global and shared memory, asynchronous copies |
| ``races`` | the race detectors of shared and of global memory |
| ``exhaustive`` | compares all pairs of accesses: what the detectors are tested with |
| ``tensor_cores`` | ldmatrix, stmatrix, mma.sync, wgmma |
| ``operands``, ``instructions`` | every other instruction |
| ``execute`` | runs blocks for a whole grid, with divergence, barriers and counters |
| ``launch`` | compiles launches for a target and hands them over |

It proves that the PTX computes the right thing for the tested shapes, that no executed path lacks a barrier, wait or
fence, that no program touches what another one writes, and that no access leaves its tensor. It does not model ptxas,
timing, caches or the rounding of hardware approximations.
"""

from mdn.bench.emulator.launch import EmulatedGPU
from mdn.bench.emulator.machine import Fault

__all__ = ["EmulatedGPU", "Fault"]

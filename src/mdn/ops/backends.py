"""Which implementation runs: `auto` chooses, a name is an order.

| backend | what | where |
|---|---|---|
| torch | chunkwise form in torch with a hand-written backward | everywhere |
| cpu | native C++ kernel | float32 and bfloat16 CPU tensors |
| triton | Triton kernels | CUDA and ROCm tensors |
| fla | flash-linear-attention's kernels, first-order rules only | CUDA tensors |
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "cpu", "triton", "fla")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

_MODULES = {
    "torch": "mdn.ops.momentum_delta_rule.torch_backend",
    "cpu": "mdn.ops.cpu",
    "triton": "mdn.ops.triton",
}


@cache
def backend_module(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name])


def check_backend_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def why_not(backend: str, tensor: Tensor) -> str | None:
    """The reason why ``backend`` cannot run the momentum delta rule on this tensor, or None if it can."""
    return _why_not(backend, str(tensor.device), tensor.dtype)


def _why_not(backend: str, device: str, dtype: torch.dtype) -> str | None:
    if backend == "torch" or device == "meta":
        return None
    if backend == "cpu":
        if device != "cpu":
            return f"the native kernel runs on CPU tensors, this one is on {device}"
        if dtype not in NATIVE_DTYPES:
            return f"the native kernel takes float32 and bfloat16, this tensor is {dtype}"
        return backend_module("cpu").why_unavailable()
    if backend == "triton":
        return backend_module("triton").why_unavailable(device)
    if backend == "fla":
        return "FLA's kernels serve the first-order rules, not the momentum delta rule"
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


# Facts about this machine: a compiler need not trace the search for libraries. This is what
# torch.compiler.assume_constant_result does; calling it here would import the compiler, and Triton with it.
_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def automatic_choice(tensor: Tensor) -> tuple[str, str]:
    """What `auto` takes for this tensor, and why."""
    if tensor.device.type == "cpu" and tensor.dtype in NATIVE_DTYPES:
        reason = why_not("cpu", tensor)
        if reason is None:
            return "cpu", f"{tensor.dtype} CPU tensor and the native kernel is built"
        return "torch", f"the native kernel is not there: {reason}"
    if tensor.device.type == "cuda":
        reason = why_not("triton", tensor)
        if reason is None:
            return "triton", "GPU tensor and Triton is usable"
        return "torch", f"Triton cannot be used: {reason}"
    return "torch", f"{tensor.dtype} on {tensor.device.type}: the torch form is the only one made for it"


def resolve(backend: str, q: Tensor, v: Tensor) -> str:
    """The backend to run. Raises with the reason when one was asked for by name and cannot run."""
    check_backend_name(backend)
    if backend == "auto":
        chosen = automatic_choice(q)[0]
        return "torch" if chosen == "triton" and _unsupported_by_triton(q, v) else chosen
    reason = why_not(backend, q) or (_unsupported_by_triton(q, v) if backend == "triton" else None)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot be used here: {reason}")
    return backend


def _unsupported_by_triton(q: Tensor, v: Tensor) -> str | None:
    from mdn.ops.triton.availability import why_unsupported

    return why_unsupported(q, v, chunk_size=64)


def chunk_size_for(backend: str, limit: int) -> int:
    """The Triton kernels are compiled for three chunk sizes: the largest that does not exceed the limit."""
    return limit if backend != "triton" else max(size for size in (16, 32, 64) if size <= max(limit, 16))


def explain_backend(tensor: Tensor, backend: str = "auto") -> str:
    """One line: what would run for this tensor, and why."""
    check_backend_name(backend)
    if backend == "auto":
        name, why = automatic_choice(tensor)
        return f"auto -> {name}: {why}"
    obstacle = why_not(backend, tensor)
    return f"{backend}: usable" if obstacle is None else f"{backend}: not usable, {obstacle}"

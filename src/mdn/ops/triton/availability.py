"""Whether the Triton kernels can run here, and if not, the reason in one line. Imports no Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator

import torch

CHUNK_SIZES = (16, 32, 64)
MAX_KEY_DIM = 256
MAX_VALUE_DIM = 512
OLDEST_TRITON = (3, 7, 1)
OLDEST_CAPABILITY = (8, 0)
INSTEAD = 'backend="torch" runs on every device'


def interpreting() -> bool:
    """True when Triton runs kernels in Python on CPU tensors (the variable must be set before Triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_emulating = False


@contextlib.contextmanager
def emulation() -> Iterator[None]:
    """Inside the block launches are executed by an emulator (mdn.bench.emulator), so CPU tensors are accepted."""
    global _emulating
    before, _emulating = _emulating, True
    try:
        yield
    finally:
        _emulating = before


@functools.cache
def triton_version() -> tuple[int, int, int] | None:
    """The installed version, or None. Read from metadata: importing Triton is slow and not wanted here."""
    if importlib.util.find_spec("triton") is None:
        return None
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"):
        try:
            found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found:
            return int(found[1]), int(found[2]), int(found[3] or 0)
    return OLDEST_TRITON  # importable, but packaged under a name we do not know


def why_unavailable(device: torch.device | str) -> str | None:
    """None if the kernels run on tensors of this device, else the reason."""
    device = torch.device(device)
    version = triton_version()
    if version is None:
        return f"Triton is not installed (pip install 'momentum-deltanet[triton]'); {INSTEAD}"
    if interpreting() or _emulating:
        return None
    if device.type != "cuda":
        return f"the tensors are on {device.type}; Triton kernels need a CUDA or ROCm GPU (or TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm GPU"
    return why_refused(version, None if torch.version.hip else torch.cuda.get_device_capability(device))


def why_refused(version: tuple[int, int, int], capability: tuple[int, int] | None) -> str | None:
    """Why this Triton version is refused on a GPU of this compute capability (None on ROCm), or None."""
    text = ".".join(map(str, version))
    if version < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return (
            f"Triton {text} is too old: these kernels need {oldest} or newer "
            f"(3.4 to 3.7.0 are known to miscompile delta-rule kernels on Hopper; {INSTEAD})"
        )
    if capability is None:
        return None
    if capability < OLDEST_CAPABILITY:
        have, need = ("{}.{}".format(*pair) for pair in (capability, OLDEST_CAPABILITY))
        return f"this GPU has compute capability {have}, the kernels need {need} or newer ({INSTEAD})"
    if capability[0] == 10 and version < (3, 8, 0):
        return (
            f"Triton {text} leaves out barriers in such kernels on data-centre Blackwell (compute capability 10.x), "
            f"and results can differ from run to run; install Triton 3.8 or newer ({INSTEAD})"
        )
    return None


def why_unsupported(q: torch.Tensor, v: torch.Tensor, chunk_size: int | None = None) -> str | None:
    """None if the kernels cover this call, else the reason. q is [..., K] and v is [..., V]; a decode step has no chunk
    size."""
    key_dim, value_dim, dtype = q.shape[-1], v.shape[-1], q.dtype
    if key_dim > MAX_KEY_DIM:
        return f"the Triton kernels take K up to {MAX_KEY_DIM}, got K={key_dim} ({INSTEAD})"
    if value_dim > MAX_VALUE_DIM:
        return f"the Triton kernels take V up to {MAX_VALUE_DIM}, got V={value_dim} ({INSTEAD})"
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        return f"the Triton kernels take chunk_size {', '.join(map(str, CHUNK_SIZES))}, got chunk_size={chunk_size}"
    if dtype == torch.float64 and not interpreting():
        return f"the Triton kernels take bfloat16, float16 or float32 on a GPU, got float64 ({INSTEAD})"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return f"the Triton kernels take bfloat16, float16 or float32, got {dtype}"
    return None

"""Finds and loads the native kernel, and mirrors its C structs (csrc/problem.h).

The kernel is a plain shared library beside this file, one per instruction set: ``_kernel_baseline.so`` (any processor),
``_kernel_avx2.so``, ``_kernel_avx512.so``. The best one that was built and that this processor can run is loaded, at
first use. ``MDN_CPU_ISA`` names one to use instead; ``MDN_CPU_LIBRARY_DIR`` names another folder (tests use both).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Problem(Structure):
    """``MdnProblem``: a forward or backward call."""

    _fields_ = [
        *_fields(c_int64, "sequences key_heads value_heads slices key_dim value_dim chunk threads"),
        *_fields(c_int64, "bfloat16 float32_key_gradient l2norm p_times_alpha has_momentum has_erase"),
        ("scale", c_double),
        *_fields(c_void_p, "offsets q k p v log_alpha log_mu beta eta initial_state initial_momentum"),
        *_fields(c_void_p, "o residual final_state final_momentum"),
        *_fields(c_void_p, "grad_o grad_final_state grad_final_momentum dq dk dp dv dlog_alpha dlog_mu dbeta deta"),
        *_fields(c_void_p, "dinitial_state dinitial_momentum"),
    ]


class Step(Structure):
    """``MdnStep``: one token per sequence."""

    _fields_ = [
        *_fields(c_int64, "batch slot_count key_heads value_heads key_dim value_dim threads"),
        *_fields(c_int64, "bfloat16 l2norm p_times_alpha has_momentum has_erase"),
        ("scale", c_double),
        *_fields(c_void_p, "slots q k p v log_alpha log_mu beta eta state momentum"),
        ("state_strides", c_int64 * 3),
        ("momentum_strides", c_int64 * 3),
        ("o", c_void_p),
    ]


def why_unavailable() -> str | None:
    """None when the native kernel can be used, otherwise one sentence that says why not."""
    return _find()[1]


def library() -> ctypes.CDLL:
    """The loaded kernel, or a RuntimeError that says why there is none."""
    found, reason = _find()
    if found is None:
        raise RuntimeError(f"the native CPU kernel cannot be used: {reason}")
    return found


def instruction_set() -> str | None:
    """Which variant is loaded: ``avx512``, ``avx2`` or ``baseline`` (None when there is none)."""
    found, _ = _find()
    return None if found is None else Path(found._name).stem.removeprefix("_kernel_")


@cache
def _find() -> tuple[ctypes.CDLL | None, str | None]:
    folder = Path(os.environ.get("MDN_CPU_LIBRARY_DIR") or Path(__file__).parent)
    baseline = folder / "_kernel_baseline.so"
    if not baseline.exists():
        return None, (
            f"{baseline.name} is not in {folder}: the package was installed without a C++ compiler "
            "(install g++ or clang++ and reinstall the package)"
        )
    try:
        asked = ctypes.CDLL(str(baseline)).mdn_supports
        wanted = _wanted()
        for name in wanted:
            path = folder / f"_kernel_{name}.so"
            if path.exists() and asked(name.encode()):
                return _declared(ctypes.CDLL(str(path))), None
    except (OSError, ValueError) as error:
        return None, f"the library does not load: {error}"
    return None, f"MDN_CPU_ISA={wanted[0]} was asked for, but it was not built or this processor cannot run it"


def _wanted() -> tuple[str, ...]:
    name = os.environ.get("MDN_CPU_ISA")
    if not name:
        return INSTRUCTION_SETS
    if name not in INSTRUCTION_SETS:
        raise ValueError(f"MDN_CPU_ISA must be one of {', '.join(INSTRUCTION_SETS)}, got {name}")
    return (name,)


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, argument in (("mdn_forward", Problem), ("mdn_backward", Problem), ("mdn_step", Step)):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [POINTER(argument)], c_int
    loaded.mdn_supports.argtypes, loaded.mdn_supports.restype = [c_char_p], c_int
    return loaded

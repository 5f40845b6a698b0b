"""The native kernel as a library: finding and loading it, its C structs, and tensors as it takes them.

The kernel is a plain shared library beside this file, one per instruction set: ``_kernel_baseline.so`` (any processor),
``_kernel_avx2.so``, ``_kernel_avx512.so``, ``_kernel_avx512vnni.so``. The best one that was built and that this
processor can run is loaded, at first use. ``MDN_CPU_ISA`` names one to use instead; ``MDN_CPU_LIBRARY_DIR`` names
another folder (tests use both).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INSTRUCTION_SETS = ("avx512vnni", "avx512", "avx2", "baseline")
INTERFACE_VERSION = 6
"""MDN_INTERFACE_VERSION of csrc/interface.h"""


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Problem(Structure):
    """``MdnProblem``: a forward or backward pass over whole sequences."""

    _fields_ = [
        *_fields(c_int64, "sequences key_heads value_heads slices key_dim value_dim chunk_size threads"),
        *_fields(c_int64, "bfloat16 float32_key_gradient l2norm p_times_alpha lookahead has_momentum has_erase"),
        ("scale", c_double),
        *_fields(c_void_p, "offsets q k p v log_alpha log_mu beta eta direct initial_S initial_M"),
        *_fields(c_void_p, "o residual final_S final_M grad_o grad_final_S grad_final_M"),
        *_fields(c_void_p, "grad_q grad_k grad_p grad_v grad_log_alpha grad_log_mu grad_beta grad_eta"),
        *_fields(c_void_p, "grad_direct grad_initial_S grad_initial_M"),
    ]


class Step(Structure):
    """``MdnStep``: one token per sequence."""

    _fields_ = [
        *_fields(c_int64, "batch slot_count key_heads value_heads key_dim value_dim threads"),
        *_fields(c_int64, "bfloat16 l2norm p_times_alpha lookahead has_momentum has_erase"),
        ("scale", c_double),
        *_fields(c_void_p, "slots q k p v log_alpha log_mu beta eta direct S M"),
        ("S_strides", c_int64 * 3),
        ("M_strides", c_int64 * 3),
        ("o", c_void_p),
    ]


class Linear(Structure):
    """``MdnLinear``: a product of few rows with a matrix of weights, packed or not."""

    _fields_ = [
        *_fields(c_int64, "batch depth outputs format threads"),
        *_fields(c_void_p, "weights scales x bias y"),
    ]


class Norm(Structure):
    """``MdnNorm``: an RMS norm, with or without a gate."""

    _fields_ = [
        *_fields(c_int64, "rows width rows_per_unit activation threads"),
        ("eps", c_double),
        *_fields(c_void_p, "x gate weight y grad_y grad_x grad_gate grad_weight"),
    ]


class SwiGlu(Structure):
    """``MdnSwiGlu``: silu(gate) * up."""

    _fields_ = [*_fields(c_int64, "count threads"), *_fields(c_void_p, "gate up y grad_y grad_gate grad_up")]


class Convolution(Structure):
    """``MdnConvolution``: short causal convolutions."""

    _fields_ = [
        *_fields(c_int64, "sequences channels width tokens_per_unit silu threads"),
        *_fields(c_void_p, "offsets x weight bias state y grad_y grad_x grad_weight grad_bias"),
    ]


class ConvolutionStep(Structure):
    """``MdnConvolutionStep``: one token of them."""

    _fields_ = [*_fields(c_int64, "batch channels width silu"), *_fields(c_void_p, "x weight bias state y")]


class GateMap(Structure):
    """``MdnGates``: the gates of the momentum delta rule."""

    _fields_ = [
        *_fields(c_int64, "rows key_heads value_heads bound_alpha bound_beta sigmoid_eta double_beta"),
        *_fields(c_double, "tau min_log_mu"),
        *_fields(c_void_p, "a b m e A_log dt_bias Mu_log mu_bias log_factor log_alpha log_mu beta eta"),
    ]


class CrossEntropy(Structure):
    """``MdnCrossEntropy``: the loss of every row of logits."""

    _fields_ = [
        *_fields(c_int64, "rows classes rows_per_unit threads"),
        *_fields(c_void_p, "logits labels loss log_sum"),
        ("grad_loss", c_double),
        ("grad_logits", c_void_p),
    ]


class VectorDecay(Structure):
    """``MdnVectorDecay``: a rule with a decay per key dimension over whole sequences."""

    _fields_ = [
        *_fields(c_int64, "sequences heads key_dim value_dim threads"),
        *_fields(c_void_p, "offsets q k p e log_alpha v initial o solved final grad_o grad_final"),
        *_fields(c_void_p, "grad_q grad_k grad_p grad_e grad_log_alpha grad_v grad_initial"),
    ]


class VectorStep(Structure):
    """``MdnVectorStep``: one token per row of such a rule."""

    _fields_ = [
        *_fields(c_int64, "batch slot_count heads key_dim value_dim threads"),
        *_fields(c_void_p, "slots q k p e log_alpha v S"),
        ("S_strides", c_int64 * 3),
        ("o", c_void_p),
    ]


MOST_STREAMS = 6
"""MDN_MOST_STREAMS of csrc/token_mixing.h"""


class Streams(Structure):
    """``MdnStreams``: tokens mixed with the ones before them."""

    _fields_ = [
        *_fields(c_int64, "rows width rows_per_unit count threads"),
        *_fields(c_void_p, "x shifted"),
        *_fields(c_void_p * MOST_STREAMS, "mix y grad_y"),
        *_fields(c_void_p, "grad_x grad_shifted grad_mix"),
    ]


class RuleInputs(Structure):
    """``MdnRuleInputs``: arguments of RWKV-7's rule."""

    _fields_ = [
        *_fields(c_int64, "rows heads head_dim rows_per_unit threads"),
        ("slowest", c_double),
        *_fields(c_void_p, "k decay rate k_k k_a w key a b grad_w grad_key grad_a grad_b"),
        *_fields(c_void_p, "grad_k grad_decay grad_rate grad_k_k grad_k_a"),
    ]


class MixedOutput(Structure):
    """``MdnMixedOutput``: norm, bonus and gate after that rule."""

    _fields_ = [
        *_fields(c_int64, "rows heads head_dim rows_per_unit threads"),
        ("eps", c_double),
        *_fields(c_void_p, "o r k v gate r_k weight bias y grad_y"),
        *_fields(c_void_p, "grad_o grad_r grad_k grad_v grad_gate grad_r_k grad_weight grad_bias"),
    ]


class Elementwise(Structure):
    """``MdnElementwise``: an operation element by element."""

    _fields_ = [
        ("operation", c_int64),
        ("number", c_double),
        *_fields(c_int64 * 4, "sizes a_strides b_strides y_strides"),
        *_fields(c_void_p, "a b y"),
    ]


class Program(Structure):
    """``MdnProgram``: pairs of addresses, of a function and of its argument."""

    _fields_ = [("count", c_int64), ("calls", c_void_p)]


STRUCTS = {
    "mdn_interface": (Problem, Step, Linear),
    "mdn_layers_interface": (Norm, SwiGlu, Convolution, ConvolutionStep, GateMap, CrossEntropy, Elementwise, Program),
    "mdn_vector_interface": (VectorDecay, VectorStep),
    "mdn_token_mixing_interface": (Streams, RuleInputs, MixedOutput),
}
"""in the order in which these functions report their sizes; the first one reports the version before them"""


def why_unavailable() -> str | None:
    """None when the native kernel can be used, otherwise one sentence that says why not."""
    return _find()[1]


def library() -> ctypes.CDLL:
    """The loaded kernel, or a RuntimeError that says why there is none."""
    loaded, reason = _find()
    if loaded is None:
        raise RuntimeError(f"the native CPU kernel cannot be used: {reason}")
    return loaded


def instruction_set() -> str | None:
    """Which variant is loaded: one of ``INSTRUCTION_SETS`` (None when there is none)."""
    loaded, _ = _find()
    return None if loaded is None else Path(loaded._name).stem.removeprefix("_kernel_")


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
        supports = ctypes.CDLL(str(baseline)).mdn_supports
        candidates = _requested_instruction_sets()
        for name in candidates:
            path = folder / f"_kernel_{name}.so"
            if path.exists() and supports(name.encode()):
                loaded = ctypes.CDLL(str(path))
                stale = _why_stale(loaded)
                return (None, stale) if stale else (_declared(loaded), None)
    except (OSError, ValueError, AttributeError) as error:
        return None, f"the library does not load: {error}"
    return None, f"MDN_CPU_ISA={candidates[0]} was requested, but it was not built or this processor cannot run it"


def _requested_instruction_sets() -> tuple[str, ...]:
    name = os.environ.get("MDN_CPU_ISA")
    if not name:
        return INSTRUCTION_SETS
    if name not in INSTRUCTION_SETS:
        raise ValueError(f"MDN_CPU_ISA must be one of {', '.join(INSTRUCTION_SETS)}, got {name}")
    return (name,)


def _why_stale(loaded: ctypes.CDLL) -> str | None:
    """A library that was built from other sources would read the structs wrongly."""
    expected = [INTERFACE_VERSION]
    built: list[int] = []
    for name, structs in STRUCTS.items():
        expected += [ctypes.sizeof(struct) for struct in structs]
        sizes = (c_int64 * (len(expected) - len(built)))()
        if hasattr(loaded, name):
            getattr(loaded, name)(sizes)
        built += sizes
    if built == expected:
        return None
    return (
        f"{Path(loaded._name).name} was built from other sources (interface version and struct sizes {built}) "
        f"than this version of mdn ({expected}): rebuild it with `python setup.py build_ext --inplace` "
        "or reinstall the package"
    )


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    with_backward = {
        "norm": Norm,
        "swiglu": SwiGlu,
        "convolution": Convolution,
        "cross_entropy": CrossEntropy,
        "streams": Streams,
        "rule_inputs": RuleInputs,
        "mixed_output": MixedOutput,
    }
    functions = {
        "mdn_forward": Problem,
        "mdn_backward": Problem,
        "mdn_step": Step,
        "mdn_linear": Linear,
        "mdn_gates": GateMap,
        "mdn_convolution_step": ConvolutionStep,
        "mdn_elementwise": Elementwise,
        "mdn_run": Program,
        "mdn_vector_forward": VectorDecay,
        "mdn_vector_backward": VectorDecay,
        "mdn_vector_step": VectorStep,
        **{f"mdn_{name}": struct for name, struct in with_backward.items()},
        **{f"mdn_{name}_backward": struct for name, struct in with_backward.items()},
    }
    for name, argument in functions.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [POINTER(argument)], c_int
    loaded.mdn_supports.argtypes, loaded.mdn_supports.restype = [c_char_p], c_int
    return loaded


# In a forked child the kernel starts threads of its own, because those of torch stayed in the parent. It learns about
# forks when it is loaded, so it is loaded before the first one that follows the import of this module; a fork before
# that is not noticed.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_find)


class CallLog(threading.local):
    """This thread's calls, while they are being recorded (``mdn.ops.cpu.program``)."""

    calls: list[Any] | None = None


call_log = CallLog()
_increment_version: Callable[[Sequence[Any]], None] = torch._C._increment_version
"""``torch.autograd.graph.increment_version`` takes twice as long"""


def call(function: str, struct: Structure, changed: Sequence[Any] = ()) -> None:
    """Calls a function of the library with its struct, which must not be changed afterwards. There is no other way to
    call one: a recording holds the calls that were made here.

    ``changed``: the caller's tensors that the function writes to. Autograd is told, as torch's own in-place operations
    tell it: a backward pass that still needs what they held raises an error.
    """
    code = getattr(library(), function)(ctypes.byref(struct))
    if code:
        _raise(code)
    if changed:
        _increment_version(changed)
    if call_log.calls is not None:
        call_log.calls.append((function, struct, changed))


def _raise(code: int) -> None:
    """Turns what a function of the library returns into an exception."""
    if code == 1:
        raise MemoryError("the native CPU kernel could not allocate its scratch memory")
    if code == 2:
        raise ValueError("state_indices must be slots of the state: an index is negative or too large")


def point(struct: Structure, **tensors: Tensor | None) -> None:
    """Writes the addresses of the tensors into the fields of their names. The struct keeps the tensors: they live as
    long as it does, in a recording too. (The shortest calls write addresses themselves, which is faster: their tensors
    are held by others, by the caller or by what the recorder keeps of torch's operations.)"""
    for name, x in tensors.items():
        if x is not None:
            setattr(struct, name, x.data_ptr())
    struct.__dict__.setdefault("kept", []).append(tensors)


def point_at_offsets(struct: Structure, offsets: Sequence[int]) -> None:
    """The same for the field ``offsets``, with a copy of these numbers as the kernel reads them."""
    numbers = (c_int64 * len(offsets))(*offsets)
    struct.offsets = ctypes.addressof(numbers)
    struct.__dict__.setdefault("kept", []).append(numbers)


def values(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """``x`` contiguous in ``dtype``; its shape must be ``shape``."""
    if x.shape == shape and x.dtype is dtype and x.is_cpu and x.is_contiguous():
        return x  # the usual case, kept short: a decode step comes here nine times
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if not x.is_cpu:
        raise ValueError(f"{name} must be a CPU tensor for the native CPU kernel, got one on {x.device}")
    return x.detach().to(dtype).contiguous()


def optional_values(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    return None if x is None else values(name, x, dtype, shape)


def io_dtype(q: Tensor) -> torch.dtype:
    """bfloat16 is read and written as it is; everything else goes through float32. (Gates and states may have any
    dtype: they are cast to float32, as every backend casts them to the dtype of the computation.)"""
    if q.dtype == torch.float64:
        raise ValueError("q must be float32 or bfloat16 for the native CPU kernel, got float64")
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def check_heads(key_heads: int, value_heads: int) -> None:
    if key_heads < 1 or value_heads % key_heads != 0:
        raise ValueError(f"v must have a multiple of the {key_heads} heads of q and k, got {value_heads}")

"""What all rules refuse and guard against: arguments that every public function checks in the same words.

Errors name the argument, what was given and what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.tracing import is_traced


def check_floating(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the output: K ** -0.5 unless given."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


PLAIN_TYPES = frozenset((Tensor, nn.Parameter, type(None)))
"""whose memory native code knows; NoneType, because an optional tensor that is absent has none to worry about"""


def in_plain_memory(tensors: Iterable[Any]) -> bool:
    """Whether native code may read and write the memory of these tensors (or None): the one place that decides it.

    A subclass (DTensor, FakeTensor and others) need not have memory. A graph that is being compiled is not asked:
    native code runs outside it, and sees the tensors then.
    """
    return PLAIN_TYPES.issuperset(map(type, tensors)) and not is_traced()


def values_can_be_read(x: Tensor) -> bool:
    """Not those of a GPU, for which the host would have to wait, and not where a tensor stands for others or for none:
    while compiling or tracing, inside a transform of torch.func, of a subclass."""
    return x.is_cpu and not torch.compiler.is_compiling() and type(x) in PLAIN_TYPES and not is_traced()


def check_log_decay(name: str, gate: Tensor) -> None:
    """Logarithms of gates in [0, 1]; ``-inf`` is a hard zero. Reads values."""
    # Extrema instead of comparisons: comparing a tensor with a number takes five times as long where a gate is small.
    # They are NaN if any value is, and every comparison with NaN is false.
    if gate.numel() > 0 and not gate.max().item() <= 0:
        raise ValueError(f"{name} must be <= 0 (the log of a gate in [0, 1]), got {worst(gate, largest=True)}")


def check_weight(name: str, gate: Tensor) -> None:
    """beta, eta and the like: finite and not negative. Reads values."""
    if gate.numel() == 0:
        return
    smallest, largest = gate.aminmax()
    if not (smallest.item() >= 0 and largest.item() < math.inf):
        raise ValueError(f"{name} must be finite and >= 0, got {worst(gate, largest=False)}")


def worst(gate: Tensor, largest: bool) -> str:
    """For messages: what is wrong with a gate that is too large (or too small)."""
    if bool(gate.isnan().any()):
        return f"NaN in {int(gate.isnan().sum())} of {gate.numel()} places"
    if bool((gate == float("inf")).any()):
        return "inf"
    return f"{(gate.max() if largest else gate.min()).item():.6g}"


def check_initial_state(state: Tensor, letters: str, expected: Sequence[int], q: Tensor) -> None:
    """``letters`` names the sizes in ``expected``."""
    check_floating("initial_state", state)
    if list(state.shape) != list(expected):
        raise ValueError(f"initial_state must have shape [{letters}] = {list(expected)}, got {list(state.shape)}")
    if state.device != q.device:
        raise ValueError(f"initial_state must be on the device of q, {q.device}, got {state.device}")


def check_packed(cu_seqlens: Tensor | SequenceBoundaries, q: Tensor) -> None:
    """Boundaries of either kind, of one packed row. Their values are read elsewhere, where they can be."""
    if not isinstance(cu_seqlens, Tensor | SequenceBoundaries):
        raise ValueError(f"cu_seqlens must be a tensor or SequenceBoundaries, got {type(cu_seqlens).__name__}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a packed row, B == 1, got B = {q.shape[0]}")


# --------------------------------------------------------------------------------------------------------- decode state


def check_decode_state(name: str, x: Tensor, expected: list[int], dtype: torch.dtype, q: Tensor) -> None:
    """A state that a decode step updates in place: shape, dtype, device, and no element in two places."""
    if list(x.shape) != expected:
        raise ValueError(f"{name} must have shape [slots, HV, K, V] = {expected}, got {list(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} to be updated in place, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if may_overlap(x):
        raise ValueError(
            f"{name} must not overlap itself to be updated in place, got shape {list(x.shape)} with strides "
            f"{list(x.stride())}: an expanded tensor needs .contiguous()"
        )


def may_overlap(x: Tensor) -> bool:
    """Whether two elements may share memory: not if every stride reaches beyond all smaller ones together."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_apart(names: str, a: Tensor, b: Tensor) -> None:
    """Two states that a step updates in place, each without overlap in itself, must not share an element."""
    at_a, at_b = a.data_ptr(), b.data_ptr()
    if at_a == 0:  # meta tensors and empty ones
        return
    earlier, later, distance = (a, b, at_b - at_a) if at_a <= at_b else (b, a, at_a - at_b)
    if earlier.is_contiguous() and distance >= earlier.nbytes:  # as nearly always
        return
    in_elements = distance // a.element_size()
    shared = _shared_elements(in_elements, earlier.shape, earlier.stride(), later.shape, later.stride())
    if shared != "none":
        raise ValueError(f"{names} must be different memory to be updated in place, but they {shared}")


@lru_cache
def _shared_elements(
    distance: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    later_shape: tuple[int, ...],
    later_strides: tuple[int, ...],
) -> str:
    """ "none", "share some" or "might share some": for two tensors, one of whose shapes may be 1 where the other's is
    larger, and the later of which begins ``distance`` elements further on."""
    dimensions = [
        (stride if size > 1 else later_stride, size, later_stride if later_size > 1 else stride, later_size)
        for size, stride, later_size, later_stride in zip(shape, strides, later_shape, later_strides)
        if size > 1 or later_size > 1
    ]
    dimensions.sort(key=lambda x: max(x[0], x[2]), reverse=True)
    return ("none", "might share some", "share some")[_meeting(distance, dimensions)]


def _meeting(distance: int, dimensions: list[tuple[int, int, int, int]]) -> int:
    """Whether two tensors, the later ``distance`` behind the other (before it if negative), share an element: 0 no,
    1 perhaps, 2 yes. ``dimensions``: (stride, size, stride of the later one, its size), the largest stride first.

    As long as that stride is the same in both, both consist of blocks that repeat with it, and two blocks ``n`` strides
    apart are two tensors of the other dimensions. Only blocks whose ranges of addresses meet are looked at: of tensors
    without overlap in themselves at most two.
    """
    if not dimensions:
        return 2 if distance == 0 else 0
    if dimensions[0][0] != dimensions[0][2]:
        reach, later_reach = _reaches(dimensions)
        return 1 if -later_reach <= distance <= reach else 0
    (stride, size, _, later_size), *block = dimensions
    reach, later_reach = _reaches(block)
    first = max(1 - later_size, -((reach - distance) // stride))
    last = min(size - 1, (distance + later_reach) // stride)
    return max((_meeting(distance - n * stride, block) for n in range(first, last + 1)), default=0)


def _reaches(dimensions: list[tuple[int, int, int, int]]) -> tuple[int, int]:
    """From the first element of each tensor to its last one."""
    later_reach = sum(later_stride * (later_size - 1) for _, _, later_stride, later_size in dimensions)
    return sum(stride * (size - 1) for stride, size, _, _ in dimensions), later_reach


def check_state_indices(state_indices: Tensor, state: Tensor, batch: int, read: bool) -> Tensor:
    """The slots as int64 ``[B]``; with ``read`` their values are checked, for CPU tensors."""
    if not isinstance(state_indices, Tensor) or state_indices.dtype not in (torch.int32, torch.int64):
        given = state_indices.dtype if isinstance(state_indices, Tensor) else type(state_indices).__name__
        raise ValueError(f"state_indices must be an int64 or int32 tensor, got {given}")
    if tuple(state_indices.shape) != (batch,):
        raise ValueError(f"state_indices must have shape [{batch}], got {list(state_indices.shape)}")
    if state_indices.device != state.device:
        raise ValueError(
            f"state_indices must be on the device of the state, {state.device}, got {state_indices.device}"
        )
    if read and values_can_be_read(state_indices):
        slots = state_indices.tolist()
        outside = [slot for slot in slots if not 0 <= slot < state.shape[0]]
        if outside:
            raise ValueError(f"state_indices must lie in 0..{state.shape[0] - 1}, got {outside[0]}")
        if len(set(slots)) < len(slots):
            raise ValueError("state_indices must be distinct: two rows cannot update the same slot")
    return state_indices.long()


# ------------------------------------------------------------------------------------------------- autocast, autograd


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disables autocast: an op manages its precision itself. (Entering autocast takes as long as a small decode step,
    so it is entered only when there is one to leave. Meta tensors have no autocast.)"""
    kind = x.device.type
    # While compiling it is not known: a backward pass is traced before the place where it will run.
    off = kind != "meta" and (torch.compiler.is_compiling() or torch.is_autocast_enabled(kind))
    return torch.autocast(kind, enabled=False) if off else nullcontext()


def has_tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a forward-mode derivative (torch.func.jvp, jacfwd, forward_ad) follows one of these tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def refuse_transforms(
    function: str, instead: str, tensors: Iterable[Tensor | None], derivatives_only: bool = False
) -> None:
    """Forward-mode derivatives and ``torch.func`` cannot see into a hand-written backward pass or a native kernel. With
    ``derivatives_only`` the other transforms of ``torch.func``, such as vmap, are let through."""
    if torch.compiler.is_compiling():
        return
    levels = get_interpreter_stack() or ()
    if any(not derivatives_only or level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels):
        what = "torch.func derivatives" if derivatives_only else "torch.func transforms"
    elif has_tangents(tensors):
        what = "forward-mode derivatives"
    else:
        return
    raise NotImplementedError(f"{function} does not support {what}; {instead} does")


def refuse_gradients(
    step: str,
    rule: str,
    tensors: Sequence[Tensor | None],
    fields: Sequence[str],
    names: Mapping[str, str] | None = None,
) -> None:
    """A decode step updates its state in place and records nothing for a backward pass: ``chunk_{rule}`` does.
    ``fields`` are the names of ``tensors``; ``names`` are what the caller calls some of them."""
    if not torch.is_grad_enabled():
        return
    for x in tensors:  # any() would take half as long again, and a step is short
        if x is not None and x.requires_grad:
            break
    else:
        return
    given = [field for field, x in zip(fields, tensors) if x is not None and x.requires_grad]
    shown = ", ".join((names or {}).get(field, field) for field in given)
    raise ValueError(
        f"{step} has no gradient: use chunk_{rule}, or torch.no_grad(); got tensors that require one: {shown}"
    )

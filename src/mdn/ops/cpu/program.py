"""A computation of fixed shapes as a list of calls, recorded once from the code that does it and replayed without it.

    program = record(function, x)          # function(x) -> y runs, and everything it does is recorded
    y = program.replay(another_x)          # the same again

Native calls become one call of the library. What torch does between them is translated into native calls where
``TRANSLATED`` knows it, is nothing at all for views and new memory, and otherwise is done again by torch. Every tensor
that was made stays where it is, so replaying allocates nothing. What the function reads beyond x (weights, states) is
read anew at every replay, at its old address: whoever replays makes sure that it is still there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mdn.ops.cpu.bindings import Elementwise, Program, call, call_log, library

aten = torch.ops.aten
SCALE, ADD, MULTIPLY, ADD_NUMBER, EXP, LOGISTIC, SWISH, SOFTPLUS = range(8)
"""MDN_SCALE ... MDN_SOFTPLUS"""
NativeCall = tuple[str, ctypes.Structure, Sequence[Any]]
"""the arguments of ``mdn.ops.cpu.bindings.call``"""
NEW_MEMORY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default)


class RecordedProgram:
    def __init__(self, x: Tensor, y: Tensor, kept: list[Any], parts: list[Callable[[], object]]):
        self.x, self.y, self.kept, self.parts = x, y, kept, parts

    @torch.no_grad()
    def replay(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        for part in self.parts:
            part()
        return self.y.clone()


@torch.no_grad()
def record(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, RecordedProgram | None]:
    """``function(x)`` and its program, or None if it has none."""
    recorder = _Recorder()
    given = x.clone()
    call_log.calls = recorder.steps
    try:
        with recorder:
            y = function(given)
    finally:
        call_log.calls = None
    if recorder.obstacle is not None:
        return y, None
    return y.clone(), RecordedProgram(given, y, [recorder.kept, recorder.steps], _joined(recorder.steps))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Any] = []
        """(name of a native function, its struct, the tensors it changes) or a function to call"""
        self.kept: list[Any] = []
        self.obstacle: str | None = None

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call_log.calls = None  # native calls inside an operation (mdn::momentum_delta_rule) are repeated with it
        try:
            result = operation(*args, **kwargs)
        finally:
            call_log.calls = self.steps
        self.kept.append((args, kwargs, result))
        if "c10d" in operation.namespace:  # what other processes send is not in the old memory
            self.obstacle = self.obstacle or str(operation)
            return result
        if operation.is_view or operation in NEW_MEMORY:
            return result
        step = _translated(operation, args, kwargs, result) or _repeated(operation, args, kwargs, result)
        if step is None:
            self.obstacle = self.obstacle or str(operation)
        elif step != ():
            self.steps.append(step)
        return result


def _repeated(operation: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The operation done again by torch, its result written to where the first one is."""
    results = result if isinstance(result, tuple | list) else (result,)
    read = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    in_place = partial(operation, *args, **kwargs) if operation._schema.is_mutable else ()
    if not all(isinstance(x, Tensor) for x in results):
        return in_place or (None if read else ())  # a number that was read from a tensor, or that no tensor decides
    inputs = {x.untyped_storage().data_ptr() for x in read}
    if all(x.untyped_storage().data_ptr() in inputs for x in results):
        return in_place  # what was changed, or a view by another name

    def repeat() -> None:
        again = operation(*args, **kwargs)
        for held, new in zip(results, again if isinstance(again, tuple | list) else (again,)):
            held.copy_(new)

    return repeat


def _translated(operation: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The operation as a native call, or None."""
    known = TRANSLATED.get(operation)
    described = None if known is None else known(*args, **kwargs)
    if described is None:
        return None
    code, number, a, b = described
    in_place = operation is aten.copy_.default
    y = args[0] if in_place else result
    if any(x.dtype != torch.float32 or not x.is_cpu or x.dim() > 4 for x in (a, b, y)):
        return None
    shape = (1,) * (4 - y.dim()) + tuple(y.shape)
    strides = [x.expand(y.shape).stride() for x in (a, b, y)]
    padded = [(0,) * (4 - len(stride)) + stride for stride in strides]
    struct = Elementwise(code, number, shape, *padded, a.data_ptr(), b.data_ptr(), y.data_ptr())
    return "mdn_elementwise", struct, (y,) if in_place else ()


def _sum(a: Any, b: Any, alpha: float = 1, sign: float = 1) -> Any:
    if not isinstance(b, Tensor):
        return (ADD_NUMBER, sign * alpha * b, a, a) if isinstance(a, Tensor) else None
    return (ADD, sign * alpha, a, b)


def _product(a: Any, b: Any) -> Any:
    return (MULTIPLY, 1.0, a, b) if isinstance(b, Tensor) else (SCALE, b, a, a)


TRANSLATED: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _sum,
    aten.sub.Tensor: lambda a, b, alpha=1: _sum(a, b, alpha, -1),
    aten.mul.Tensor: _product,
    aten.div.Tensor: lambda a, b: None if isinstance(b, Tensor) else (SCALE, 1 / b, a, a),
    aten.neg.default: lambda a: (SCALE, -1.0, a, a),
    aten.clone.default: lambda a, memory_format=None: (SCALE, 1.0, a, a),
    aten.copy_.default: lambda y, a, non_blocking=False: (SCALE, 1.0, a, a),
    aten.exp.default: lambda a: (EXP, 1.0, a, a),
    aten.sigmoid.default: lambda a: (LOGISTIC, 1.0, a, a),
    aten.silu.default: lambda a: (SWISH, 1.0, a, a),
    aten.softplus.default: lambda a, beta=1, threshold=20: (SOFTPLUS, 1.0, a, a) if beta == 1 else None,
}
"""operation -> (its number in csrc/layers.h, the number that goes with it, first and second operand)"""


def _joined(steps: list[Any]) -> list[Callable[[], object]]:
    """Neighbouring native calls as one."""
    parts: list[Callable[[], object]] = []
    waiting: list[NativeCall] = []
    for step in steps:
        if isinstance(step, tuple):
            waiting.append(step)
            continue
        if waiting:
            parts.append(_native_part(waiting))
        waiting = []
        parts.append(step)
    return [*parts, _native_part(waiting)] if waiting else parts


def _native_part(calls: list[NativeCall]) -> Callable[[], object]:
    loaded = library()
    addresses = []
    for name, struct, _ in calls:
        addresses += [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value, ctypes.addressof(struct)]
    array = (ctypes.c_void_p * len(addresses))(*addresses)
    program = Program(len(calls), ctypes.addressof(array))
    changed = [x for _, _, tensors in calls for x in tensors]

    def run(kept: Any = (array, calls)) -> None:
        call("mdn_run", program, changed)

    return run

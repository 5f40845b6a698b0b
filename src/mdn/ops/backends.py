"""Which implementation runs: one table of rule family x backend. ``auto`` selects one; an explicit name is binding.

| backend | what it is | momentum | scalar decay | vector decay | vector momentum | where |
|---|---|---|---|---|---|---|
| torch | chunkwise form in torch | yes | yes | yes | yes | everywhere |
| cpu | native C++ kernel | yes | yes | yes | no | float32 and bfloat16 CPU tensors |
| triton | Triton kernels | yes | no | no | no | CUDA and ROCm tensors |
| fla | flash-linear-attention's kernels | no | yes | yes | no | CUDA tensors |

Scalar decay: linear_attn, simple_gla, delta_rule, gated_delta_rule, comba. Vector decay: gla, kda, rwkv7. Vector
momentum: the momentum delta rule with a decay for every key dimension.

The environment variable ``MDN_BACKEND`` replaces ``auto``: it is as binding as ``backend=``, which wins over it.
Where ``auto`` has to leave out the Triton kernels on a GPU, it says so once, through the logger ``mdn``.
``registered_backend`` adds a backend from outside for a while; ``auto`` never selects it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mdn.ops.shared_checks import PLAIN_TYPES, in_plain_memory

BACKENDS = ("auto", "torch", "cpu", "triton", "fla")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

_MODULES: dict[str, dict[str, str]] = {
    "momentum": {"torch": "mdn.ops.momentum.chunk_torch", "cpu": "mdn.ops.cpu", "triton": "mdn.ops.triton"},
    "scalar decay": {"torch": "mdn.ops.first_order.chunk_scalar", "cpu": "mdn.ops.cpu", "fla": "fla.ops"},
    "vector decay": {"torch": "mdn.ops.first_order.chunk_vector", "cpu": "mdn.ops.cpu", "fla": "fla.ops"},
    "vector momentum": {"torch": "mdn.ops.momentum.vector_torch"},
}
"""family -> backend -> module that computes it"""

_FAMILIES: dict[str, str] = {
    "momentum": "momentum",
    **dict.fromkeys(("linear_attn", "simple_gla", "delta_rule", "gated_delta_rule", "comba"), "scalar decay"),
    **dict.fromkeys(("gla", "kda", "rwkv7"), "vector decay"),
    "vector_momentum": "vector momentum",
}
"""rule -> family"""

_PREFERRED: dict[str, tuple[str, ...]] = {
    "momentum": ("triton", "cpu"),
    "scalar decay": ("fla", "cpu"),
    "vector decay": ("fla", "cpu"),
    "vector momentum": (),
}
"""what ``auto`` tries before torch, in this order"""

_DEVICES = {"cpu": "cpu", "triton": "cuda", "fla": "cuda"}
"""the device type that a backend was made for"""

_NOT_FOR_FAMILY = {
    ("momentum", "fla"): "FLA's kernels serve the first-order rules, not the momentum delta rule",
    ("scalar decay", "triton"): "the Triton kernels serve the momentum delta rule, not the first-order rules",
    ("vector decay", "triton"): "the Triton kernels serve the momentum delta rule, not the first-order rules",
    ("vector momentum", "cpu"): "the native kernel has no momentum with a decay per key dimension",
    ("vector momentum", "triton"): "the Triton kernels have no decay per key dimension",
    ("vector momentum", "fla"): "FLA's kernels serve the first-order rules, not the momentum delta rule",
}


prepared_steps: dict[Any, Any] = {}
"""decode steps of all rules that were checked and bound to a backend, by signature (ops/momentum/step.py)"""
_ADDED: dict[str, dict[str, tuple[Any, Callable[[Tensor], str | None] | None]]] = {family: {} for family in _MODULES}
"""family -> backends that were registered from outside: (what has forward, backward and step_, why it cannot run)"""


def family_of(rule: str) -> str:
    """``momentum``, ``scalar decay``, ``vector decay`` or ``vector momentum``; of a rule's name or the family's own."""
    if rule in _MODULES:
        return rule
    if rule not in _FAMILIES:
        raise ValueError(f"rule must be one of {', '.join(_FAMILIES)}, got {rule!r}")
    return _FAMILIES[rule]


def backend_module(backend: str, family: str = "momentum") -> Any:
    """What computes this family: a module, imported at first use, or what was registered."""
    return _ADDED[family][backend][0] if backend in _ADDED[family] else _import(_MODULES[family][backend])


@cache
def _import(module: str) -> ModuleType:
    return importlib.import_module(module)


@contextmanager
def registered_backend(
    name: str, module: Any, family: str = "momentum", why_not: Callable[[Tensor], str | None] | None = None
) -> Iterator[None]:
    """Make ``backend=name`` known inside the ``with`` block, in which backward passes through it must run, too.

    ``module`` has the functions that docs/architecture.md lists; ``why_not`` gives the reason why it cannot run for
    tensors like q, or None.
    """
    if family not in ("momentum", "vector momentum"):
        raise ValueError(f"family must be 'momentum' or 'vector momentum' for a backend from outside, got {family!r}")
    if name in BACKENDS or name in _ADDED[family]:
        raise ValueError(f"name must be new, but there is a backend {name!r} already")
    _ADDED[family][name] = module, why_not
    try:
        yield
    finally:
        del _ADDED[family][name]
        prepared_steps.clear()  # another backend may take over the name


# ------------------------------------------------------------------------------------------------------------ requests


def requested_backend(backend: str) -> tuple[str, str]:
    """The name that was requested and, for messages, by whom: ``MDN_BACKEND`` replaces ``auto``."""
    if backend != "auto":
        _check_name("backend", backend)
        return backend, f"backend={backend!r}"
    name = environment_backend()
    _check_name("MDN_BACKEND", name)
    return name, f"MDN_BACKEND={name!r}"


def _check_name(argument: str, name: str) -> None:
    known = (*BACKENDS, *(added for family in _ADDED.values() for added in family))
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {name!r}")


def environment_backend() -> str:
    """What replaces ``auto``; it is read at every call (a compiled function keeps what it was compiled with)."""
    return os.environ.get("MDN_BACKEND") or "auto"


def resolve(
    backend: str,
    tensor: Tensor,
    rule: str = "momentum",
    v: Tensor | None = None,
    decode: bool = False,
    features: tuple[str, ...] = (),
) -> str:
    """The backend to run for tensors like q. Raises with the reason when the requested one cannot run.

    ``v`` lets shapes be checked too; ``decode`` is for a single step; ``features`` are those of the momentum rule that
    are in use: ``direct``, ``lookahead``.
    """
    name, request = requested_backend(backend)
    if name == "auto":
        chosen, why = automatic_choice(tensor, rule, v, decode, features)
        if chosen == "torch" and tensor.device.type == "cuda" and "triton" in _PREFERRED[family_of(rule)]:
            _warn_once(why)
        return chosen
    reason = why_not(name, tensor, rule, v, decode, features)
    if reason is not None:
        raise ValueError(f"{request} cannot be used here: {reason}")
    return name


def with_states(chosen: str, backend: str, *states: Tensor | None) -> str:
    """The backend of a decode step, given the one that ``resolve`` has chosen. All but torch, those registered from
    outside included, are only given states in rows of V neighbouring numbers: the contract of ``step_`` in
    docs/architecture.md. For any other state ``auto`` selects torch, and a backend that was requested raises."""
    scattered = [x for x in states if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1]
    if chosen == "torch" or not scattered:
        return chosen
    name, request = requested_backend(backend)
    if name != "auto":
        given = f"strides {list(scattered[0].stride())}"
        raise ValueError(f"{request} needs a state that is contiguous in its last dimension, got {given}")
    return "torch"


_warned: set[str] = set()


def _warn_once(why: str) -> None:
    """A user who computes without the kernels on a GPU should know it."""
    if why not in _warned:
        _warned.add(why)
        logging.getLogger("mdn").warning(
            'backend="auto" runs torch on this GPU: %s. To choose that without this warning, set MDN_BACKEND=torch', why
        )


def automatic_choice(
    tensor: Tensor,
    rule: str = "momentum",
    v: Tensor | None = None,
    decode: bool = False,
    features: tuple[str, ...] = (),
) -> tuple[str, str]:
    """What ``auto`` selects for tensors like this one, and why."""
    family = family_of(rule)
    obstacles = []
    for backend in _PREFERRED[family]:
        reason = _why_not_by_default(backend, family, tensor) or why_not(backend, tensor, rule, v, decode, features)
        if reason is None:
            return backend, f"{tensor.dtype} on {tensor.device.type}, and {backend} can be used"
        if _DEVICES[backend] == tensor.device.type:
            obstacles.append(f"{backend} cannot be used: {reason}")
    return "torch", "; ".join(obstacles) or f"no other backend was made for {tensor.device.type} tensors"


def _why_not_by_default(backend: str, family: str, tensor: Tensor) -> str | None:
    """Why ``auto`` leaves out a backend that would work."""
    if tensor.is_meta or (backend in ("triton", "cpu") and tensor.device.type != _DEVICES[backend]):
        return f"{backend} was made for {_DEVICES[backend]} tensors"
    # A compiler can look into the torch form and not into the kernel, which would end its graph.
    if backend == "cpu" and family != "momentum" and torch.compiler.is_compiling():
        return "a compiler can fuse the torch form"
    return None


# ------------------------------------------------------------------------------------------------------------ reasons


def why_not(
    backend: str,
    tensor: Tensor,
    rule: str = "momentum",
    v: Tensor | None = None,
    decode: bool = False,
    features: tuple[str, ...] = (),
) -> str | None:
    """The reason why ``backend`` cannot compute this rule for tensors like q (and v, if given), or None if it
    can."""
    family = family_of(rule)
    if backend in _ADDED[family]:
        if features:
            return f"it was registered for the rule of the paper, without {' and '.join(features)}"
        reason_of = _ADDED[family][backend][1]
        return None if reason_of is None else reason_of(tensor)
    if backend not in _MODULES[family]:
        return _NOT_FOR_FAMILY.get((family, backend), f"it was not registered for {family} rules")
    if backend == "fla" and decode:
        return "FLA's kernels are used for whole sequences, not for decode steps"
    reason = _why_not(backend, str(tensor.device), tensor.dtype)
    if reason is None and backend == "cpu":
        reason = _why_not_in_memory(tensor, family)
    if reason is None and backend == "triton" and v is not None:
        from mdn.ops.triton.availability import why_unsupported

        return why_unsupported(tensor, v)
    return reason


def _why_not(backend: str, device: str, dtype: torch.dtype) -> str | None:
    if backend == "torch" or device == "meta":
        return None
    if backend == "cpu":
        return _why_not_cpu(device, dtype)
    if backend == "fla":
        return _why_not_fla(device, dtype)
    reason: str | None = backend_module("triton").why_unavailable(device)
    return reason


# Facts about this machine: a compiler need not trace the search for libraries, nor what is said about it. This is what
# torch.compiler.assume_constant_result does; calling it here would import the compiler, and Triton with it.
environment_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_cpu(device: str, dtype: torch.dtype) -> str | None:
    if device != "cpu":
        return f"the native kernel runs on CPU tensors, this one is on {device}"
    if dtype not in NATIVE_DTYPES:
        return f"the native kernel takes float32 and bfloat16, this tensor is {dtype}"
    reason: str | None = backend_module("cpu").why_unavailable()
    return reason


def _why_not_in_memory(tensor: Tensor, family: str) -> str | None:
    """The kernels of the momentum rule are inside a custom op, which such tensors know how to pass."""
    if family == "momentum" or tensor.is_meta or torch.compiler.is_compiling() or in_plain_memory((tensor,)):
        return None
    if type(tensor) in PLAIN_TYPES:
        return "neither tracers nor torch.func can see into the native kernel"
    return f"the native kernel reads memory, which a {type(tensor).__name__} need not have"


def _why_not_fla(device: str, dtype: torch.dtype) -> str | None:
    if not device.startswith("cuda"):
        return f"FLA's kernels need tensors on a GPU, this one is on {device}"
    if dtype == torch.float64:
        return "FLA's kernels do not compute in float64"
    if not _installed("fla"):
        return "FLA is not installed (pip install 'momentum-deltanet[fla]')"
    return None


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def chunk_size_for(backend: str, limit: int) -> int:
    """The Triton kernels are compiled for three chunk sizes: the largest that does not exceed the limit."""
    return limit if backend != "triton" else max(size for size in (16, 32, 64) if size <= max(limit, 16))


def explain_backend(tensor: Tensor, backend: str = "auto", rule: str = "momentum") -> str:
    """One line: what would run for tensors like this one, and why.

    ``rule`` is ``momentum``, ``vector_momentum`` or a first-order rule: ``linear_attn``, ``simple_gla``,
    ``delta_rule``, ``gated_delta_rule``, ``comba``, ``gla``, ``kda`` or ``rwkv7``.
    """
    name, request = requested_backend(backend)
    if name == "auto":
        chosen, why = automatic_choice(tensor, rule)
        return f"auto -> {chosen}: {why}"
    label = name if backend != "auto" else request
    obstacle = why_not(name, tensor, rule)
    return f"{label}: usable" if obstacle is None else f"{label}: not usable, {obstacle}"

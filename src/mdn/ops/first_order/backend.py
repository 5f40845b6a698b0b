"""Which code computes a first-order rule: this project's torch form, its native CPU kernel, or FLA's GPU kernels.

`auto` may choose; a backend asked for by name works or raises with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mdn.ops.backends import backend_module, why_not
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.inputs import expand_heads

BACKENDS = ("auto", "torch", "cpu", "fla")
GROUPED_IN_FLA = ("gated_delta_rule", "comba", "kda")
"""the rules whose kernels know value heads that share a key head"""

HINTS = ("cu_seqlens_cpu", "chunk_indices", "safe_gate", "disable_recompute", "lower_bound")
"""arguments of FLA's functions that change how its kernels compute, not what"""
REFUSED = {
    "cp_context": "context parallelism is not offered for the first-order rules",
    "return_intermediate_states": "states inside a sequence are not returned; call the rule on its pieces",
    "use_graph": "it belongs to FLA's Ascend kernels",
    "max_num_seqs": "it belongs to FLA's Ascend kernels",
}


def check_hints(hints: Mapping[str, Any]) -> None:
    """Further arguments of FLA's functions: hints go to its kernels and mean nothing elsewhere, others are refused."""
    for name, value in hints.items():
        if name in REFUSED and value:
            raise ValueError(f"{name}={value!r} is not supported: {REFUSED[name]}")
        if name not in HINTS and name not in REFUSED:
            raise ValueError(
                f"unknown argument {name!r}; beyond the signature FLA's hints are taken: {', '.join(HINTS)}"
            )


def choose_backend(x: Tensor, backend: str, native: bool = True) -> str:
    """'torch', 'cpu' or 'fla' for tensors like x; raises if a backend asked for by name cannot work.

    `native` says whether the native CPU kernel knows the rule.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} for a first-order rule, got {backend!r}")
    if backend == "auto":
        if _why_not_fla(x) is None:
            return "fla"
        # A compiler can look into the torch form and not into the kernel, which would end its graph.
        wanted = x.dtype == torch.float32 and x.device.type == "cpu" and not torch.compiler.is_compiling()
        return "cpu" if wanted and _why_not_cpu(x, native) is None else "torch"
    reason = _why_not_fla(x) if backend == "fla" else _why_not_cpu(x, native) if backend == "cpu" else None
    if reason:
        raise ValueError(f"backend={backend!r} cannot be used here: {reason}")
    return backend


def _why_not_fla(x: Tensor) -> str | None:
    if x.device.type != "cuda":
        return f"FLA's kernels need tensors on a GPU, this one is on {x.device}"
    if x.dtype == torch.float64:
        return "FLA's kernels do not compute in float64"
    if find_spec("fla") is None:
        return "FLA is not installed (pip install 'momentum-deltanet[fla]')"
    return None


def _why_not_cpu(x: Tensor, native: bool) -> str | None:
    if not native:
        return "the native kernel has no decay per key dimension"
    if not hasattr(native_kernel(), "first_order_forward"):
        return "this build of the native kernel has no first-order rules"
    return why_not("cpu", x)


def native_kernel() -> ModuleType:
    return backend_module("cpu")


def call_fla(
    rule: str,
    tensors: Mapping[str, Any],
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Tensor | SequenceBoundaries | None,
    **options: Any,
) -> Any:
    """Call FLA's `chunk_<rule>` by argument names; imported only now, because it brings Triton with it."""
    if isinstance(cu_seqlens, SequenceBoundaries):
        cu_seqlens = cu_seqlens.cu_seqlens
    if rule not in GROUPED_IN_FLA:
        heads = tensors["v"].shape[2]
        tensors = {name: expand_heads(x, heads) if name in ("q", "r", "k") else x for name, x in tensors.items()}
    state = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
    compute = getattr(importlib.import_module(f"fla.ops.{rule}"), f"chunk_{rule}")
    return compute(**tensors, **state, cu_seqlens=cu_seqlens, **options)

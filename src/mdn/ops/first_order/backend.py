"""Which code computes a first-order rule: this project's torch form, its native CPU kernel, or FLA's GPU kernels.

`auto` may choose; a backend asked for by name works or raises with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from mdn.ops.backends import backend_module, resolve
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.first_order.inputs import expand_heads

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
    """'torch', 'cpu' or 'fla' for tensors like x; raises if a backend requested explicitly cannot run.

    `native` says whether the native CPU kernel knows the rule.
    """
    return resolve(backend, x, "gated_delta_rule" if native else "kda")


def native_kernel() -> ModuleType:
    return backend_module("cpu", "scalar decay")


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

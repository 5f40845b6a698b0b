"""The calls whose launches are compared: forward + backward, and one decoding step, ours and FLA's, on zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdn.bench.kernels import Variant
from mdn.ops.triton.tiles import FULL_GPU, assume_heads


@dataclass(frozen=True)
class Size:
    """Heads and widths of one layer."""

    heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"H={self.heads} K={self.key_dim} V={self.value_dim}"


def run_mdn(size: Size, length: int, after_pass: Callable[[], None] | None = None) -> None:
    """Forward and backward of the momentum delta rule, with the tiles of a full GPU. ``after_pass`` is called after
    each of the two, here and in the other ops."""
    variant = Variant("", size.key_dim, size.value_dim, 1, length, size.heads, size.heads)
    with assume_heads(FULL_GPU):
        for which in ("forward", "backward"):
            variant.run(which)
            if after_pass is not None:
                after_pass()


def _first_order_inputs(size: Size, length: int) -> dict[str, Tensor]:
    """All but the decay, whose shape is the op's own."""
    widths = {"q": (size.key_dim,), "k": (size.key_dim,), "v": (size.value_dim,), "beta": ()}
    return {name: torch.zeros(1, length, size.heads, *width, dtype=torch.bfloat16) for name, width in widths.items()}


def _run_first_order(
    op: Callable[..., Any],
    size: Size,
    length: int,
    gate: Tensor,
    after_pass: Callable[[], None] | None,
    backward: bool = True,
) -> None:
    inputs = {name: x.requires_grad_() for name, x in (_first_order_inputs(size, length) | {"g": gate}).items()}
    o = op(**inputs, use_qk_l2norm_in_kernel=True)[0]
    if after_pass is not None:
        after_pass()
    if not backward:
        return
    o.sum().backward()
    if after_pass is not None:
        after_pass()


def run_gdn(size: Size, length: int, after_pass: Callable[[], None] | None = None, backward: bool = True) -> None:
    """FLA's gated delta rule, as its layer calls it."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    _run_first_order(chunk_gated_delta_rule, size, length, torch.zeros(1, length, size.heads), after_pass, backward)


def run_kda(size: Size, length: int, after_pass: Callable[[], None] | None = None, backward: bool = True) -> None:
    """FLA's KDA, as its layer calls it."""
    from fla.ops.kda import chunk_kda

    gate = torch.zeros(1, length, size.heads, size.key_dim)
    _run_first_order(chunk_kda, size, length, gate, after_pass, backward)


RUNS: dict[str, Callable[..., None]] = {"mdn": run_mdn, "gdn": run_gdn, "kda": run_kda}


def decode_mdn(size: Size) -> None:
    """One token of one sequence, with the states updated in place."""
    Variant("", size.key_dim, size.value_dim, 1, 1, size.heads, size.heads).run("decode")


def decode_gdn(size: Size) -> None:
    """FLA's gated delta rule for one token, as its layer decodes."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    _decode_first_order(fused_recurrent_gated_delta_rule, size, torch.zeros(1, 1, size.heads))


def decode_kda(size: Size) -> None:
    """FLA's KDA for one token, as its layer decodes."""
    from fla.ops.kda import fused_recurrent_kda

    _decode_first_order(fused_recurrent_kda, size, torch.zeros(1, 1, size.heads, size.key_dim))


@torch.no_grad()
def _decode_first_order(op: Callable[..., Any], size: Size, gate: Tensor) -> None:
    state = torch.zeros(1, size.heads, size.key_dim, size.value_dim)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    op(**_first_order_inputs(size, 1), g=gate, **options)


DECODES: dict[str, Callable[[Size], None]] = {"mdn": decode_mdn, "gdn": decode_gdn, "kda": decode_kda}

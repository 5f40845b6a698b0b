"""The Triton backend of the momentum delta rule: `forward`, `backward` and `step_` for GPU tensors.

Importing this package does not import Triton; the first use of one of the three does. What each kernel does:
docs/kernels.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mdn.ops.triton.availability import why_unavailable, why_unsupported

if TYPE_CHECKING:
    from mdn.ops.triton.host import backward, forward, step_

__all__ = ["backward", "forward", "step_", "why_unavailable", "why_unsupported"]


def __getattr__(name: str) -> Any:
    if name in ("backward", "forward", "step_"):
        from mdn.ops.triton import host

        return getattr(host, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

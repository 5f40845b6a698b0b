"""Whether tensors have numbers at this moment, or torch only follows what is done with them."""

from __future__ import annotations

import torch
from torch._C._functorch import maybe_current_level

_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def is_traced() -> bool:
    """Whether torch is only following operations, without numbers in memory: inside transforms of torch.func,
    torch.jit.trace, make_fx and FakeTensorMode."""
    return (
        maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING_MODES)))
    )

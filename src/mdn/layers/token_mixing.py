"""What surrounds RWKV-7's rule: the streams, the rule's arguments, and the output.

Each is a torch definition and, for float32 CPU tensors, native code that passes over memory once (``mdn.ops.fused``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn.ops.cpu import token_mixing as native
from mdn.ops.cpu.bindings import MOST_STREAMS
from mdn.ops.cpu.token_mixing import KeyTensors, OutputTensors, RuleArguments
from mdn.ops.fused import Kernel

SLOWEST_LOG_DECAY = -math.exp(-0.5)

# ------------------------------------------------------------------------------------------------------------- streams


class _Streams(Kernel[tuple[Tensor, ...]]):
    def fits(self, x: Tensor, shifted: Tensor, *mixes: Tensor) -> bool:
        width = x.shape[-1]
        parameters = all(mix.shape[-1:] == (width,) and mix.numel() == width and mix.dim() <= x.dim() for mix in mixes)
        return x.shape == shifted.shape and parameters

    def definition(self, x: Tensor, shifted: Tensor, *mixes: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.addcmul(x, shifted, mix) for mix in mixes)

    def forward(self, x: Tensor, shifted: Tensor, *mixes: Tensor) -> tuple[Tensor, ...]:
        return native.streams(x, shifted, mixes)

    def backward(
        self, grad: tuple[Tensor, ...], x: Tensor, shifted: Tensor, *mixes: Tensor
    ) -> tuple[Tensor | None, ...]:
        return native.streams_backward(grad, x, shifted, mixes)


_streams = _Streams()


def mixed_streams(x: Tensor, shifted: Tensor, *mixes: Tensor) -> tuple[Tensor, ...]:
    """A token mixed with the one before it, in another proportion for every stream: ``x + shifted * mix`` for every
    mix (six at most); x and shifted ``[B, T, D]``, a mix has D elements."""
    if len(mixes) > MOST_STREAMS:
        raise ValueError(f"there can be {MOST_STREAMS} streams at most, got {len(mixes)}")
    return _streams(x, shifted, *mixes)


# ----------------------------------------------------------------------------------------------- arguments of the rule


@dataclass(frozen=True)
class _RuleInputs(Kernel[tuple[Tensor, ...]]):
    heads: int

    def fits(self, k: Tensor, decay: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor) -> bool:
        width = k.shape[-1:]
        return k.shape == decay.shape == rate.shape and k_k.shape == k_a.shape == width and width[0] % self.heads == 0

    def definition(self, k: Tensor, decay: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor) -> tuple[Tensor, ...]:
        rate = rate.sigmoid()
        flat = (SLOWEST_LOG_DECAY * decay.sigmoid(), k * (1 + (rate - 1) * k_a), k * k_k, rate)
        w, key, scaled, rate = (x.unflatten(-1, (self.heads, -1)) for x in flat)
        kappa = F.normalize(scaled, dim=-1)
        return w, key, -kappa, kappa * rate

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(native.rule_inputs(KeyTensors(*tensors), self.heads, SLOWEST_LOG_DECAY))

    def backward(self, grad: tuple[Tensor, ...], *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return native.rule_inputs_backward(RuleArguments(*grad), KeyTensors(*tensors), self.heads, SLOWEST_LOG_DECAY)


def rule_inputs(k: Tensor, decay: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor, heads: int) -> RuleArguments:
    """The arguments w, k, a, b of the rule ``[..., H, D]``, from projections ``[..., H * D]`` and parameters
    ``[H * D]``: the log decay, the key at the in-context learning rate, -kappa, and kappa times that rate."""
    return RuleArguments(*_RuleInputs(heads)(k, decay, rate, k_k, k_a))


# -------------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class _MixedOutput(Kernel[Tensor]):
    eps: float

    def fits(
        self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor
    ) -> bool:
        heads, width = o.shape[-2:], gate.shape[-1:]
        return (
            o.shape == r.shape == k.shape == v.shape
            and gate.shape == (*o.shape[:-2], heads.numel())
            and r_k.shape == heads
            and weight.shape == bias.shape == width
        )

    def definition(
        self, o: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        # a layer norm of every head takes a third of the time of torch's group norm on CPUs
        normed = F.layer_norm(o, o.shape[-1:], eps=self.eps).flatten(-2) * weight + bias
        own = (r * k * r_k).sum(-1, keepdim=True) * v
        return (normed + own.flatten(-2)) * gate

    def forward(self, *tensors: Tensor) -> Tensor:
        return native.mixed_output(OutputTensors(*tensors), self.eps)

    def backward(self, grad: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return native.mixed_output_backward(grad, OutputTensors(*tensors), self.eps)


def mixed_output(
    o: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """``(groupnorm(o) + (r . (k * r_k)) v) * gate``, ``[..., H * D]``: o, r, k, v ``[..., H, D]``, the gate
    ``[..., H * D]``, r_k ``[H, D]``; weight and bias ``[H * D]`` are those of the norm, whose groups are the heads."""
    return _MixedOutput(eps)(o, r, k, v, gate, r_k, weight, bias)

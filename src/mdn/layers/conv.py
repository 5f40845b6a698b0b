"""Causal depthwise convolution over the last few tokens, followed by SiLU: ``y_t = silu(sum_j w_j x_{t - W + 1 + j})``.

Shapes: x, y ``[B, T, C]`` or packed ``[1, total, C]``; weight ``[C, 1, W]``; state ``[N, C, W - 1]``, the last inputs
of every sequence, oldest first. No sequence of a pack sees another one: each gets its own W - 1 entries in front,
filled with its state or with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers.token_layout import TokenLayout, make_layout
from mdn.ops.cpu.layers import MOST_TAPS, ConvolutionSettings, convolution_step
from mdn.ops.fused import Convolution, is_native

if TYPE_CHECKING:
    from mdn.parallel import ContextParallelPlan


class KernelWeights(NamedTuple):
    """What ``mdn.ops.fused.Convolution`` takes: ``[C, 1, W]``, ``[C]``, and whether SiLU follows."""

    weight: Tensor
    bias: Tensor | None
    silu: bool


class CausalWindow(nn.Module):
    """A map of every token and the W - 1 before it; a subclass has ``convolve``, ``kernel_weights`` and ``advance``."""

    channels: int
    width: int

    def convolve(self, extended: Tensor) -> Tensor:
        """``[1 or B, W - 1 + T, C]`` to ``[1 or B, T, C]``: a valid convolution."""
        raise NotImplementedError

    def kernel_weights(self, x: Tensor) -> KernelWeights:
        """``convolve`` for the native kernel, in the dtype of x."""
        raise NotImplementedError

    def advance(self, x: Tensor, state: Tensor) -> Tensor:
        """One token ``[B, C]`` after ``state [B, C, W - 1]``, which advances in place."""
        raise NotImplementedError

    def step(self, x: Tensor, state: Tensor, slots: Tensor | None = None) -> Tensor:
        """The same; with ``slots`` (int64 ``[B]``) the state of row b is ``state[slots[b]]``. See ``forward``."""
        y: Tensor = self(x, state=state, slots=slots, step=True)[0]
        return y

    def _step(self, x: Tensor, state: Tensor, slots: Tensor | None) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.channels:
            raise ValueError(f"x must have shape [B, {self.channels}], got {list(x.shape)}")
        rows = x.shape[0] if slots is None else state.shape[0]
        if state.shape != (rows, self.channels, self.width - 1):
            shown = rows if slots is None else "slots"
            raise ValueError(
                f"state must have shape [{shown}, {self.channels}, {self.width - 1}], got {list(state.shape)}"
            )
        if slots is None:
            return self.advance(x, state)
        if slots.shape != x.shape[:1]:
            raise ValueError(f"slots must have shape [{x.shape[0]}], got {list(slots.shape)}")
        held = state.index_select(0, slots)
        y = self.advance(x, held)
        state.index_copy_(0, slots, held)
        return y

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout | None = None,
        state: Tensor | None = None,
        return_state: bool = False,
        context_parallel: ContextParallelPlan | None = None,
        slots: Tensor | None = None,
        step: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """y, and with ``return_state`` the state after the last token; ``state=None``: nothing came before.

        With a plan (its own, or the layout's) x holds one rank's tokens and states are those of all documents.
        ``step`` and ``slots`` are for the method ``step``: one token ``[B, C]`` after ``state``, which advances in
        place. It comes through here because a call of the module is what other libraries prepare: accelerate's hooks
        bring offloaded weights, and with tensor parallelism the forward pass sees this rank's part of them.
        """
        if step:
            if state is None:
                raise ValueError("step=True needs the state that the token comes after")
            return self._step(x, state, slots), state
        if slots is not None:
            raise ValueError("slots are for one token (step=True), got a call for whole sequences")
        if x.dim() != 3 or x.shape[2] != self.channels:
            raise ValueError(f"x must have shape [B, T, {self.channels}], got {list(x.shape)}")
        if layout is None:
            layout = make_layout((x.shape[0], x.shape[1]), context_parallel=context_parallel)
        if layout.context_parallel is not None:
            return self._over_ranges(x, layout, layout.context_parallel, state, return_state)
        return self._forward(x, layout, state, return_state)

    def _over_ranges(
        self, x: Tensor, layout: TokenLayout, plan: ContextParallelPlan, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The inputs before a piece are those of other ranges, and then those before its document."""
        history = plan.history(x, self.width - 1, None if state is None else state.mT)
        y, last = self._forward(x, layout, history.mT, return_state)
        return y, None if last is None else plan.final_of_documents(last, state)

    def _forward(
        self, x: Tensor, layout: TokenLayout, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        self._check_sequences(x, layout, state)
        history_has_gradient = state is not None and state.requires_grad
        if return_state or history_has_gradient or self.width > MOST_TAPS or not is_native(x):
            return self._define(x, layout, state, return_state)
        ends = range(0, x.shape[0] * x.shape[1] + 1, x.shape[1] or 1)
        offsets = ends if layout.boundaries is None else layout.boundaries.offsets
        weight, bias, silu = self.kernel_weights(x)
        settings = ConvolutionSettings(offsets, None if state is None else state.to(x.dtype).contiguous(), silu)
        convolution = Convolution(settings, lambda x, *parameters: self._define(x, layout, state, False)[0])
        return convolution(x, weight, bias), None

    def _check_sequences(self, x: Tensor, layout: TokenLayout, state: Tensor | None) -> None:
        """x is what the layout describes, and the state has as many sequences."""
        sequences = x.shape[0]
        if layout.boundaries is not None:
            sequences, total = layout.boundaries.num_sequences, layout.boundaries.total
            if x.shape[:2] != (1, total):
                raise ValueError(f"x must begin with [1, {total}] as the pack of the layout does, got {list(x.shape)}")
        if state is None:
            return
        expected = [sequences, self.channels, self.width - 1]
        if list(state.shape) != expected:
            raise ValueError(f"state must have shape {expected}, got {list(state.shape)}")
        if state.device != x.device:
            raise ValueError(f"state must be on the device of x, {x.device}, got {state.device}")

    def _define(
        self, x: Tensor, layout: TokenLayout, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        history = self.width - 1
        if layout.boundaries is None:
            extended = F.pad(x, (0, 0, history, 0)) if state is None else torch.cat([state.mT.to(x.dtype), x], dim=1)
            y = self.convolve(extended)
            last = extended[:, x.shape[1] :].mT if return_state else None
            return y, last
        at = layout.extended_indices(history, x.device)
        extended = x.new_zeros(1, x.shape[1] + at.front.numel(), self.channels).index_copy(1, at.tokens, x)
        if state is not None:
            extended = extended.index_copy(1, at.front, state.mT.to(x.dtype).reshape(1, -1, self.channels))
        # output t of the valid convolution ends at entry t + history of the extended pack
        y = self.convolve(extended).index_select(1, at.tokens - history)
        last = extended[0].index_select(0, at.last).reshape(-1, history, self.channels).mT if return_state else None
        return y, last


class ShortConvolution(CausalWindow):
    def __init__(self, channels: int, width: int, bias: bool = False, activation: bool = True):
        super().__init__()
        if width < 2:
            raise ValueError(
                f"a short convolution's width (conv_size) must be at least 2, got {width}; "
                "use_short_conv=False removes the convolution"
            )
        self.channels = channels
        self.width = width
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def kernel_weights(self, x: Tensor) -> KernelWeights:
        return KernelWeights(self.weight, self.bias, self.activation)

    def keep_part(self, ranks: int) -> None:
        """Count only the channels of one of ``ranks`` ranks; the weights are cut elsewhere (mdn.parallel.tensor)."""
        self.channels //= ranks

    def advance(self, x: Tensor, state: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        fits = x.shape[1:] == weight.shape[:1] and state.shape == (*x.shape, self.width - 1)
        native = fits and is_native(x, weight, bias, state) and state.is_contiguous()
        if native and _are_contiguous(weight, bias) and not torch.is_grad_enabled():
            return convolution_step(x.contiguous(), weight, bias, state, self.activation)
        window = torch.cat([state, x.to(state.dtype).unsqueeze(-1)], dim=-1)
        state.copy_(window[..., 1:])
        y = (window * self._taps().mT).sum(-1)
        return self._finish(y, x.dtype)

    def _taps(self) -> Tensor:
        """Weights as ``[W, C]``, at least float32 so that half-precision inputs are summed in float32."""
        weight = self.weight[:, 0].mT
        return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight

    def convolve(self, extended: Tensor) -> Tensor:
        # Shifted products rather than conv1d: no transposes, as fast on CPU, and one fused kernel under torch.compile.
        taps = self._taps()
        time = extended.shape[1] - self.width + 1
        y = extended[:, :time] * taps[0]
        for j in range(1, self.width):
            y = torch.addcmul(y, extended[:, j : j + time], taps[j])
        return self._finish(y, extended.dtype)

    def _finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        y = y if self.bias is None else y + self.bias
        return (F.silu(y) if self.activation else y).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}, silu={self.activation}"


def _are_contiguous(weight: Tensor, bias: Tensor | None) -> bool:
    """The native step reads both as they lie in memory, without strides."""
    return weight.is_contiguous() and (bias is None or bias.is_contiguous())

"""Host side of the chunkwise form: allocates buffers and launches two kernels forward, six backward.

Shapes as in docs/architecture.md. All tensors are seen as [tokens, heads, width] with tokens = B * T; a sequence is a
row of the batch or a member of a pack. A buffer has one name, here, in the kernels' parameters and in docs/kernels.md:
a launch takes what its kernel names from the arguments gathered so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors
from mdn.ops.triton.availability import why_unsupported
from mdn.ops.triton.backward_gates import backward_gates_kernel
from mdn.ops.triton.backward_inputs import backward_inputs_kernel
from mdn.ops.triton.backward_scores import backward_scores_kernel
from mdn.ops.triton.backward_states import backward_states_kernel
from mdn.ops.triton.forward_states import forward_states_kernel
from mdn.ops.triton.launcher import kernel_name, launch
from mdn.ops.triton.prepare import prepare_kernel
from mdn.ops.triton.rebuild_states import rebuild_states_kernel
from mdn.ops.triton.tiles import Tile, choose_tile, power_of_two, target_of


@dataclass
class Pass:
    """One forward or backward pass: its sizes, the buffers it allocates, and all arguments of its kernels by name."""

    q: Tensor
    v: Tensor
    boundaries: SequenceBoundaries | None
    options: RuleOptions
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        boundaries = self.boundaries
        packed = boundaries is not None
        precision, solve_precision = precisions(self.q)
        self.arguments.update(
            cu_seqlens=None if boundaries is None else boundaries.cu_seqlens,
            chunk_indices=None if boundaries is None else boundaries.chunk_indices(self.options.chunk_size),
            time=self.q.shape[1],
            sequences=self.sequences,
            plane=self.tokens * self.value_heads,
            key_dim=self.q.shape[-1],
            value_dim=self.v.shape[-1],
            scale=self.options.scale,
            H=self.q.shape[2],
            HV=self.value_heads,
            K=self.q.shape[-1],
            V=self.v.shape[-1],
            C=self.options.chunk_size,
            BK=power_of_two(self.q.shape[-1]),
            L2NORM=self.options.l2norm,
            P_TIMES_ALPHA=self.options.p_times_alpha,
            PACKED=packed,
            PRECISION=precision,
            SOLVE_PRECISION=solve_precision,
            COMPUTE=tl.float64 if self.q.dtype == torch.float64 else tl.float32,
        )

    @property
    def tokens(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    @property
    def value_heads(self) -> int:
        return self.v.shape[2]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.boundaries is None else self.boundaries.num_sequences

    @property
    def chunks(self) -> int:
        """How many chunks there are in all sequences together."""
        if self.boundaries is None:
            return self.q.shape[0] * triton.cdiv(self.q.shape[1], self.options.chunk_size)
        return self.boundaries.chunk_indices(self.options.chunk_size).shape[0]

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def add(self, **arguments: Tensor | None) -> None:
        """Add tensors by the name that kernels know them by. Kernels take contiguous ones."""
        for name, tensor in arguments.items():
            self.arguments[name] = None if tensor is None else tensor.contiguous()

    def take(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.arguments[name] for name in names)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def empty_square(self, dtype: torch.dtype) -> Tensor:
        """One [C, C] matrix per chunk and value head, a row beside each token."""
        return self.empty(self.tokens, self.value_heads, self.options.chunk_size, dtype=dtype)

    def empty_vectors(self, count: int) -> Tensor:
        """``count`` numbers per token and value head."""
        return self.empty(count, self.tokens, self.value_heads, dtype=self.compute_dtype)

    def empty_per_chunk(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """``shape`` per chunk and value head; `blocks.chunk_at` says which row belongs to which chunk."""
        rows = self.tokens // self.options.chunk_size + self.sequences
        return self.empty(rows, self.value_heads, *shape, dtype=dtype)

    def empty_states(self) -> Tensor:
        """S and M of every chunk, in the input dtype."""
        return self.empty_per_chunk(2, self.q.shape[-1], self.v.shape[-1], dtype=self.q.dtype)

    def launch_per_chunk(self, kernel: Any, heads: int) -> None:
        """One program per chunk of any sequence and head: all chunks at once."""
        self._launch(kernel, self.tile(kernel), (self.chunks, heads))

    def launch_per_sequence(self, kernel: Any) -> None:
        """One program per sequence, value head and tile of V columns, which walks from chunk to chunk."""
        tile = self.tile(kernel)
        columns = triton.cdiv(self.v.shape[-1], tile.value_block)
        self._launch(kernel, tile, (self.sequences * self.value_heads, columns))

    def tile(self, kernel: Any) -> Tile:
        widths = self.q.shape[-1], self.v.shape[-1]
        given_p = self.arguments["p"] is not None
        return choose_tile(kernel_name(kernel), *widths, self.q.element_size(), target_of(self.q.device), given_p)

    def _launch(self, kernel: Any, tile: Tile, grid: tuple[int, int]) -> None:
        launch(kernel, grid, tile, self.arguments | {"BV": tile.value_block})


def precisions(q: Tensor) -> tuple[str, str]:
    """How to take products of float32 operands: (coefficients and float32 inputs, the product with the inverse).

    The coefficient product and the triangular inverse always have float32 quality. The inverse is applied to values
    that came through 16-bit products, where one TF32 product is enough. ROCm has no tf32x3, but true float32 products.
    """
    if target_of(q.device).startswith("gfx"):
        return "ieee", "ieee"
    return "tf32x3", "tf32" if q.element_size() == 2 else "tf32x3"


def prepare(current: Pass, with_gamma: bool) -> None:
    """The state-free part of all chunks: what both passes begin with."""
    current.add(
        inverse=current.empty_square(current.compute_dtype),
        scores=current.empty_square(current.q.dtype),
        coefficients=current.empty_vectors(8),
        decays=current.empty_per_chunk(4, dtype=current.compute_dtype),
        gamma=current.empty_square(current.compute_dtype) if with_gamma else None,
    )
    current.launch_per_chunk(prepare_kernel, current.value_heads)


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    """The forward pass of a backend, as `mdn.ops.momentum.interface` describes it."""
    q, v = tensors.q, tensors.v
    reason = why_unsupported(q, v, options.chunk_size)
    if reason is not None:
        raise ValueError(reason)
    current = Pass(q, v, boundaries, options)
    current.add(**tensors._asdict())
    prepare(current, with_gamma=False)

    state_shape = (2, current.sequences, current.value_heads, q.shape[-1], v.shape[-1])
    current.add(
        o=current.empty(*v.shape, dtype=v.dtype),
        residual=current.empty(*v.shape, dtype=v.dtype) if save_residual else None,
        final_state=current.empty(*state_shape, dtype=current.compute_dtype),
    )
    current.launch_per_sequence(forward_states_kernel)
    o, final_state, residual = current.take("o", "final_state", "residual")
    return ForwardResult(o, final_state, current.empty(0, dtype=v.dtype) if residual is None else residual)


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    """Gradients of all inputs, as `mdn.ops.momentum.interface` describes them."""
    q, v = tensors.q, tensors.v
    current = Pass(q, v, boundaries, options)
    current.add(**tensors._asdict(), residual=residual)
    current.add(grad_o=grad_o.to(v.dtype), grad_final_state=grad_final_state)
    for name, tensor in tensors._asdict().items():
        gradient = "grad_initial_state" if name == "initial_state" else "d" + name
        current.add(**{gradient: None if tensor is None else current.empty(*tensor.shape, dtype=tensor.dtype)})
    prepare(current, with_gamma=True)

    current.add(states=current.empty_states(), state_gradients=current.empty_states())
    current.launch_per_sequence(rebuild_states_kernel)
    current.launch_per_sequence(backward_states_kernel)

    current.add(q_weights=current.empty_square(q.dtype), p_weights=current.empty_square(q.dtype))
    current.add(d_gamma=current.empty_square(current.compute_dtype))
    current.launch_per_chunk(backward_scores_kernel, current.value_heads)

    current.add(sums=current.empty_vectors(7), overlaps=current.empty_per_chunk(4, dtype=current.compute_dtype))
    current.launch_per_chunk(backward_inputs_kernel, q.shape[2])
    current.launch_per_chunk(backward_gates_kernel, current.value_heads)
    names = ("dq", "dk", "dv", "dp", "dlog_alpha", "dlog_mu", "dbeta", "deta", "grad_initial_state")
    return RuleTensors(*current.take(*names))

"""Host side: allocates buffers and launches three kernels forward, six backward, one for a decoding step.

All tensors are seen as [tokens, heads, width] with tokens = B * T; a sequence is a row of the batch or a member of a
pack. A buffer has one name, here, in the kernels' parameters and in docs/kernels.md: a launch takes what its kernel
names from the arguments gathered so far.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdn.ops import chunking
from mdn.ops.boundaries import SequenceBoundaries
from mdn.ops.momentum.interface import ForwardResult, RuleOptions, RuleTensors, StepState, compute_dtype
from mdn.ops.triton.availability import why_unsupported
from mdn.ops.triton.backward_chunks import backward_inputs_kernel, backward_scores_kernel
from mdn.ops.triton.backward_gates import backward_gates_kernel
from mdn.ops.triton.contain import contain_kernel
from mdn.ops.triton.decode import decode_kernel
from mdn.ops.triton.device import GRAD_VECTORS, VECTORS
from mdn.ops.triton.prepare import prepare_kernel
from mdn.ops.triton.scans import backward_states_kernel, forward_states_kernel, rebuild_states_kernel
from mdn.ops.triton.tiles import Tile, choose_chunk_size, choose_tile, power_of_two, target_of

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


# ------------------------------------------------------------------------------------------------------------ launches


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments by name and its tile."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    tile: Tile

    @property
    def name(self) -> str:
        """The name used in tables and in `tiles`."""
        return kernel_name(self.kernel)

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told besides the arguments. Fused multiply-add is requested: its default is changing."""
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": True}


def kernel_name(kernel: Any) -> str:
    return kernel.__name__.removesuffix("_kernel")


def run_launch(launch: Launch) -> None:
    """Start the kernel on the device of its tensors."""
    tensor = next(value for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    # Triton launches on the current device, which need not be the tensors' own.
    guard = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with guard:
        launch.kernel[launch.grid](**launch.arguments, **launch.options)


@functools.cache
def announce_build(passes: str, key_dim: int, value_dim: int, dtype: torch.dtype, seconds: int) -> None:
    """Say once per process that the first call of its kind takes long."""
    logging.getLogger("mdn").warning(
        "Triton builds the kernels of the %s for K=%d, V=%d, %s: about %d seconds, unless its cache has them",
        *(passes, key_dim, value_dim, str(dtype).removeprefix("torch."), seconds),
    )


_handler: Callable[[Launch], None] = run_launch


def start(kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: Mapping[str, Any]) -> None:
    """Start a kernel with those of the arguments that its parameters name; an empty grid starts nothing."""
    if 0 not in grid:
        _handler(Launch(kernel, grid, {name: arguments[name] for name in kernel.arg_names}, tile))


@contextlib.contextmanager
def intercept_launches(handler: Callable[[Launch], None]) -> Iterator[None]:
    """Inside the block, launches go to ``handler``, which may call `run_launch`: for tests and `mdn bench kernels`."""
    global _handler
    before, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = before


# --------------------------------------------------------------------------------------------------- forward, backward


@dataclass
class Pass:
    """One forward or backward pass: its sizes, the buffers it allocates, and all arguments of its kernels by name."""

    tensors: RuleTensors
    boundaries: SequenceBoundaries | None
    options: RuleOptions
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        q, boundaries, options = self.tensors.q, self.boundaries, self.options
        self.batch, self.time, self.key_heads, self.key_dim = q.shape
        self.value_heads, self.value_dim = self.tensors.v.shape[2:]
        self.sequences = self.batch if boundaries is None else boundaries.num_sequences
        target = target_of(q.device)
        self.chunk_size = choose_chunk_size(options.chunk_size, self.key_dim, target)
        chunk_indices = None if boundaries is None else chunking.chunk_indices(boundaries, self.chunk_size)
        if chunk_indices is None:
            self.chunks = self.batch * triton.cdiv(self.time, self.chunk_size)
        else:
            self.chunks = chunk_indices.shape[0]
        self.operand_dtype = operand_dtype(q.dtype)
        self.compute_dtype = compute_dtype(q)
        precision, exact = precisions(q)
        hopper = target.startswith("sm_9")
        self.arguments.update(
            cu_seqlens=None if boundaries is None else boundaries.cu_seqlens,
            chunk_indices=chunk_indices,
            time=self.time,
            sequences=self.sequences,
            scale=options.scale,
            H=self.key_heads,
            HV=self.value_heads,
            K=self.key_dim,
            V=self.value_dim,
            WIDTH=power_of_two(self.value_dim),
            C=self.chunk_size,
            BK=power_of_two(self.key_dim),
            BLOCK=min(32, power_of_two(self.key_dim)),
            L2NORM=options.l2norm,
            P_TIMES_ALPHA=options.p_times_alpha,
            LOOKAHEAD=options.lookahead,
            PACKED=boundaries is not None,
            HELD=hopper and self.operand_dtype.itemsize == 2,
            BY_WARP=hopper and self.operand_dtype.itemsize > 2,
            # 16-bit inputs round the residual far above what a stored inverse loses: no refinement.
            REFINE=q.dtype.itemsize > 2,
            PIECE=8 if target.startswith("sm_8") else 4,
            OPERAND=TRITON_DTYPES[self.operand_dtype],
            PRECISION=precision,
            EXACT=exact,
            COMPUTE=TRITON_DTYPES[self.compute_dtype],
        )
        self.add(**self.tensors._asdict())

    def add(self, **arguments: Tensor | None) -> None:
        """Add tensors by the name that kernels know them by. Kernels take contiguous ones."""
        for name, tensor in arguments.items():
            self.arguments[name] = None if tensor is None else tensor.contiguous()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tensors.q.device)

    def empty_per_chunk(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """``shape`` per chunk and value head; `device.chunk_at` says which slot belongs to which chunk."""
        rows = self.batch * self.time // self.chunk_size + self.sequences
        return self.empty(rows * self.value_heads, *shape, dtype=dtype)

    def empty_squares(self, dtype: torch.dtype) -> Tensor:
        """A matrix [C, C] per chunk and value head."""
        return self.empty_per_chunk(self.chunk_size, self.chunk_size, dtype=dtype)

    def empty_states(self) -> Tensor:
        """S and M per chunk and value head. They are operands of products only, so float32 would buy nothing."""
        return self.empty_per_chunk(2, self.key_dim, self.value_dim, dtype=self.operand_dtype)

    def start_per_chunk(self, kernel: Any, heads: int) -> None:
        """One program per chunk of any sequence and head: all chunks at once."""
        self._start(kernel, lambda tile: self.chunks * heads)

    def start_per_sequence(self, kernel: Any) -> None:
        """One program per sequence, value head and tile of V columns, which walks from chunk to chunk."""
        self._start(kernel, lambda tile: self.scan_programs(tile.value_block))

    def start_per_head(self, kernel: Any) -> None:
        """One program per sequence and value head."""
        self._start(kernel, lambda tile: self.sequences * self.value_heads)

    def scan_programs(self, value_block: int) -> int:
        return self.sequences * self.value_heads * triton.cdiv(self.value_dim, value_block)

    def _start(self, kernel: Any, programs: Callable[[Tile], int]) -> None:
        target = target_of(self.tensors.q.device)
        tile = choose_tile(
            kernel_name(kernel),
            self.key_dim,
            self.value_dim,
            self.operand_dtype.itemsize,
            target,
            chunk_size=self.chunk_size,
            given_p=self.tensors.p is not None,
            grouped=self.value_heads > self.key_heads,
            heads=self.sequences * self.value_heads,
        )
        threads = tile.warps * (64 if target.startswith("gfx9") else 32)
        start(kernel, (programs(tile),), tile, self.arguments | {"BV": tile.value_block, "THREADS": threads})

    def prepare(self, backward: bool) -> Tensor:
        """The state-free part of all chunks: what both passes begin with. Returns erase, which becomes an argument of
        later kernels only where they refine by it."""
        erase = self.empty_squares(self.compute_dtype)
        self.add(
            attend=self.empty_squares(self.operand_dtype),
            erase=erase,
            inverse=self.empty_squares(self.compute_dtype),
            vectors=self.empty_per_chunk(VECTORS.value, self.chunk_size, dtype=self.compute_dtype),
            gamma_S=self.empty_squares(self.compute_dtype),
            gamma_M=self.empty_squares(self.compute_dtype) if backward else None,
        )
        self.arguments["BACKWARD"] = backward
        if self.tensors.q.is_cuda:
            which, seconds = ("backward pass", 60) if backward else ("forward pass", 20)
            announce_build(which, self.key_dim, self.value_dim, self.tensors.q.dtype, seconds)
        self.start_per_chunk(prepare_kernel, self.value_heads)
        if not self.arguments["REFINE"]:
            self.add(erase=None)
        return erase


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of operands of large products and of the buffers that hold them. float16 inputs are widened: states,
    their gradients and the gradients of scores may pass 65,504 where all inputs and results are in range. TF32
    products keep as many digits as float16 has."""
    return torch.float32 if dtype == torch.float16 else dtype


def precisions(q: Tensor) -> tuple[str, str]:
    """How to take products of float32 operands: (of inputs, states and the inverse; of coefficients).

    Coefficients always have float32 quality. For 16-bit inputs the others meet values that came through 16-bit
    rounding, where one TF32 product is enough. ROCm has no tf32x3, but true float32 products.
    """
    if target_of(q.device).startswith("gfx"):
        return "ieee", "ieee"
    return "tf32" if q.element_size() == 2 else "tf32x3", "tf32x3"


def forward(
    tensors: RuleTensors, boundaries: SequenceBoundaries | None, options: RuleOptions, save_residual: bool
) -> ForwardResult:
    """The forward pass of a backend, as `mdn.ops.momentum.interface` describes it."""
    q, v = tensors.q, tensors.v
    refuse_unsupported(q, v, options.chunk_size)
    current = Pass(tensors, boundaries, options)
    erase = current.prepare(backward=False)
    o = current.empty(*(v.shape if options.outputs else (0,)), dtype=v.dtype)
    residual = current.empty(*(v.shape if save_residual else (0,)), dtype=v.dtype)
    state_shape = (2, current.sequences, current.value_heads, current.key_dim, current.value_dim)
    final_state = current.empty(*state_shape, dtype=current.compute_dtype)
    current.add(o=o if options.outputs else None, residual=residual if save_residual else None, final_state=final_state)
    current.start_per_sequence(forward_states_kernel)
    if options.outputs:  # else there is nothing that a later token could have spoilt
        current.add(erase=erase)
        current.start_per_head(contain_kernel)
    return ForwardResult(o, final_state, residual)


def backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    tensors: RuleTensors,
    residual: Tensor,
    boundaries: SequenceBoundaries | None,
    options: RuleOptions,
) -> RuleTensors:
    """Gradients of all inputs, as `mdn.ops.momentum.interface` describes them."""
    current = Pass(tensors, boundaries, options)
    gradients = RuleTensors(*(None if x is None else current.empty(*x.shape, dtype=x.dtype) for x in tensors))  # type: ignore[arg-type]
    current.add(**{f"grad_{name}": gradient for name, gradient in gradients._asdict().items()})
    current.add(residual=residual, grad_o=grad_o.to(tensors.v.dtype), grad_final_state=grad_final_state)
    current.prepare(backward=True)

    current.add(states=current.empty_states(), grad_states=current.empty_states())
    current.start_per_sequence(rebuild_states_kernel)
    current.start_per_sequence(backward_states_kernel)

    current.add(
        grad_qk=current.empty_squares(current.operand_dtype),
        grad_pk=current.empty_squares(current.operand_dtype),
        grad_gamma_S=current.empty_squares(current.compute_dtype),
        grad_gamma_M=current.empty_squares(current.compute_dtype),
        grad_vectors=current.empty_per_chunk(GRAD_VECTORS.value, current.chunk_size, dtype=current.compute_dtype),
    )
    current.start_per_chunk(backward_scores_kernel, current.value_heads)
    current.start_per_chunk(backward_inputs_kernel, current.key_heads)
    current.start_per_chunk(backward_gates_kernel, current.value_heads)
    return gradients


def refuse_unsupported(q: Tensor, v: Tensor, chunk_size: int | None = None) -> None:
    reason = why_unsupported(q, v, chunk_size)
    if reason is not None:
        raise ValueError(reason)


# ------------------------------------------------------------------------------------------------------------ decoding


def step_(tensors: RuleTensors, state: StepState, options: RuleOptions) -> Tensor:
    """One token of every row; updates S and M in place and returns o [B, HV, V].

    Rows whose slot lies outside S and M are skipped: no state changes and their o is zero.
    """
    q, v, S, M = tensors.q, tensors.v, state.S, state.M
    refuse_unsupported(q, v)
    for name, tensor in (("S", S), ("M", M)):
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    batch, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    o = torch.empty(batch, value_heads, value_dim, dtype=v.dtype, device=v.device)
    rows = batch * value_heads
    if q.is_cuda:
        announce_build("decoding step", key_dim, value_dim, q.dtype, 10)
    tile = choose_tile("decode", key_dim, value_dim, S.element_size(), target_of(q.device), heads=rows)
    read = {"direct": None} | tensors._asdict() | {"state_indices": state.state_indices}
    arguments: dict[str, Any] = {name: None if x is None else x.contiguous() for name, x in read.items()}
    arguments |= {"S": S, "M": M, "slots": S.shape[0], "o": o}
    arguments |= zip(("S_slot_stride", "S_head_stride", "S_row_stride"), S.stride()[:3])
    arguments |= zip(("M_slot_stride", "M_head_stride", "M_row_stride"), (0, 0, 0) if M is None else M.stride()[:3])
    arguments |= {"H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "scale": options.scale}
    arguments |= {"BK": power_of_two(key_dim), "BV": tile.value_block}
    arguments |= {"L2NORM": options.l2norm, "P_TIMES_ALPHA": options.p_times_alpha}
    arguments |= {"LOOKAHEAD": options.lookahead}
    arguments |= {"COMPUTE": TRITON_DTYPES[compute_dtype(q)]}
    start(decode_kernel, (rows * triton.cdiv(value_dim, tile.value_block),), tile, arguments)
    return o

"""Makes Triton's interpreter trustworthy for bfloat16 and TF32, and counts what kernels write.

With TRITON_INTERPRET=1 (set before Triton is imported) kernels run in NumPy on CPU tensors. As shipped (3.7 to 3.9),
the interpreter keeps bfloat16 as raw 16-bit integers and computes with those integers, cuts instead of rounding when it
casts, and ignores `input_precision`. `repair` replaces the operations concerned; `count_written_bytes` notes
what stores really write.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

_repaired = False


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The 16-bit patterns nearest to float32 values, ties to even, as the hardware rounds."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """The float32 values of 16-bit patterns."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def round_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 values with 10 bits of mantissa, ties away from zero, as `cvt.rna.tf32` rounds."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), rounded, values).astype(np.float32)


def _is_bfloat16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _numbers(handle: Any) -> np.ndarray:
    return bfloat16_values(handle.data) if _is_bfloat16(handle) else handle.data


def _bfloat16(values: np.ndarray) -> Any:
    return stock.TensorHandle(bfloat16_bits(values), tl.bfloat16)


def _elementwise(original: Callable) -> Callable:
    """Wrap unary_op, binary_op or ternary_op: compute bfloat16 operands in float32 and round the result."""

    @functools.wraps(original)
    def repaired(self, *arguments):
        *handles, operation = arguments
        if not any(_is_bfloat16(handle) for handle in handles):
            return original(self, *arguments)
        values = operation(*(_numbers(handle) for handle in handles))
        return stock.TensorHandle(values, tl.int1) if values.dtype == np.bool_ else _bfloat16(values)

    return repaired


def _cast(original: Callable) -> Callable:
    """Wrap a cast: round to bfloat16 instead of cutting, and read bfloat16 as numbers."""

    @functools.wraps(original)
    def repaired(self, source, target, *rounding):
        if source.dtype.scalar == target.scalar:
            return stock.TensorHandle(source.data, target.scalar)
        wide_enough = min(source.dtype.scalar.primitive_bitwidth, target.scalar.primitive_bitwidth) > 8
        if target.scalar == tl.bfloat16 and wide_enough:
            return _bfloat16(source.data.astype(np.float32))
        if _is_bfloat16(source) and wide_enough:
            return stock.TensorHandle(_numbers(source).astype(stock._get_np_dtype(target)), target.scalar)
        return original(self, source, target, *rounding)

    return repaired


def _matrix_product(a: np.ndarray, b: np.ndarray, precision: str) -> np.ndarray:
    """a @ b of float32 operands as the tensor cores take it: ieee, tf32 (one product) or tf32x3 (three)."""
    if precision == "IEEE":
        return a @ b
    a_high, b_high = round_to_tf32(a), round_to_tf32(b)
    if precision == "TF32":
        return a_high @ b_high
    a_low, b_low = round_to_tf32(a - a_high), round_to_tf32(b - b_high)
    return a_high @ b_low + a_low @ b_high + a_high @ b_high


def _dot(emulate_tf32: bool) -> Callable:
    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = _numbers(a), _numbers(b)
        total = d.data.dtype
        if left.dtype == np.float16:
            left, right = left.astype(np.float32), right.astype(np.float32)
        if emulate_tf32 and a.dtype.scalar == tl.float32:
            product = _matrix_product(left, right, str(input_precision).rsplit(".", 1)[-1].upper())
        else:
            product = np.matmul(left, right)
        return stock.TensorHandle((product + d.data).astype(total), d.dtype.scalar)

    return create_dot


def _reduction(original: Callable) -> Callable:
    """Wrap sums and scans: add bfloat16 up in float32 and round once."""

    @functools.wraps(original)
    def repaired(self, input):
        if not isinstance(input, tuple):
            return self.apply((input,))[0]
        narrow = [tensor.dtype.scalar == tl.bfloat16 for tensor in input]
        if not any(narrow):
            return original(self, input)
        wide = tuple(
            self.to_tensor(bfloat16_values(tensor.handle.data), tl.float32) if is_narrow else tensor
            for tensor, is_narrow in zip(input, narrow)
        )
        return tuple(
            _rounded(result) if is_narrow and result.dtype.scalar == tl.float32 else result
            for result, is_narrow in zip(original(self, wide), narrow)
        )

    return repaired


def _generic_scan(self: Any, input: Any) -> list[Any]:
    """`tl.associative_scan`, a whole slice at a time: as shipped it calls the combining function once per element."""
    slices = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in input]
    totals = [[part[0]] for part in slices]
    for i in range(1, len(slices[0])):
        before = [self.to_tensor(total[-1], tensor.dtype) for total, tensor in zip(totals, input)]
        here = [self.to_tensor(np.ascontiguousarray(part[i]), tensor.dtype) for part, tensor in zip(slices, input)]
        joined = self.combine_fn.fn(*before, *here)
        for total, result in zip(totals, joined if isinstance(joined, tuple) else (joined,)):
            total.append(result.handle.data.reshape(total[0].shape))
    stacked = [np.ascontiguousarray(np.moveaxis(np.stack(total), 0, self.axis)) for total in totals]
    return [self.to_tensor(data, tensor.dtype) for data, tensor in zip(stacked, input)]


def _rounded(tensor: Any) -> Any:
    kind = tl.block_type(tl.bfloat16, list(tensor.shape)) if tensor.type.is_block() else tl.bfloat16
    return tl.core.tensor(_bfloat16(tensor.handle.data), kind)


def repair(emulate_tf32: bool = False) -> None:
    """Replace the interpreter's bfloat16 operations; with emulate_tf32 also take float32 dots in their precision."""
    global _repaired
    builder = stock.InterpreterBuilder
    builder.create_dot = _dot(emulate_tf32)
    if _repaired:
        return
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, _elementwise(getattr(builder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _cast(getattr(builder, name)))
    if not hasattr(builder, "get_bf16"):  # Triton 3.7
        builder.get_bf16 = lambda self, value: _bfloat16(np.array([value], dtype=np.float32))
    stock.ScanOps.generic_scan = _generic_scan
    stock.ReduceScanOpInterface.apply = _reduction(stock.ReduceScanOpInterface.apply)
    _repaired = True


class WrittenBytes:
    """Every store so far, as (address of its first element, bytes)."""

    def __init__(self) -> None:
        self.stores: list[tuple[int, int]] = []

    @property
    def total(self) -> int:
        return sum(count for _, count in self.stores)

    def within(self, begin: int, size: int) -> int:
        """Bytes of the stores that begin in this piece of memory."""
        return sum(count for address, count in self.stores if begin <= address < begin + size)


@contextlib.contextmanager
def count_written_bytes() -> Iterator[WrittenBytes]:
    """Note every store inside the block, masked-off elements not included."""
    builder, written = stock.InterpreterBuilder, WrittenBytes()
    original = builder.create_masked_store

    def counting(self, pointers, value, mask, *rest):
        addresses = pointers.data[mask.data.astype(bool)]
        if addresses.size:
            written.stores.append((int(addresses.flat[0]), addresses.size * value.data.dtype.itemsize))
        return original(self, pointers, value, mask, *rest)

    builder.create_masked_store = counting
    try:
        yield written
    finally:
        builder.create_masked_store = original

"""Single operations under the repaired interpreter against torch, printed as JSON (run by test_interpreter.py)."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

from mdn.bench.gpu.interpreter import count_written_bytes, repair, round_to_tf32


@triton.jit
def operations_kernel(x, y, out, N: tl.constexpr):
    """Row i of out [7, N, N] holds one operation on bfloat16 tiles x and y."""
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + index)
    b = tl.load(y + index)
    tl.store(out + index, a + b)
    tl.store(out + N * N + index, a * b)
    tl.store(out + 2 * N * N + index, -a)
    tl.store(out + 3 * N * N + index, tl.broadcast_to(tl.sum(a, axis=1)[:, None], [N, N]))
    tl.store(out + 4 * N * N + index, tl.cumsum(a, axis=1))
    tl.store(out + 5 * N * N + index, tl.where(a > b, a, b))
    tl.store(out + 6 * N * N + index, (a.to(tl.float32) * 1.01).to(tl.bfloat16))


@triton.jit
def dot_kernel(x, y, out, N: tl.constexpr, PRECISION: tl.constexpr):
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + index, tl.dot(tl.load(x + index), tl.load(y + index), input_precision=PRECISION))


@triton.jit
def masked_store_kernel(out, COUNT: tl.constexpr):
    index = tl.arange(0, 128)
    tl.store(out + index, index.to(tl.float32).to(tl.bfloat16), mask=index < COUNT)


def largest(found, expected):
    return (found.double() - expected.double()).abs().max().item()


def dot(x, y, precision):
    out = torch.empty(x.shape[0], x.shape[0])
    dot_kernel[(1,)](x, y, out, x.shape[0], precision)
    return out


def bfloat16_operations(x, y):
    n = x.shape[0]
    out = torch.empty(7, n, n, dtype=torch.bfloat16)
    operations_kernel[(1,)](x, y, out, n)
    wide = x.float()
    expected = {
        "add": x + y,
        "multiply": x * y,
        "negate": -x,
        "sum": wide.sum(1, keepdim=True).expand(n, n).bfloat16(),
        "cumsum": wide.cumsum(1).bfloat16(),
        "compare": torch.maximum(x, y),
        "round": (wide * 1.01).bfloat16(),
    }
    order = ("add", "multiply", "negate", "sum", "cumsum", "compare", "round")
    return {name: largest(out[order.index(name)], value) for name, value in expected.items()}


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(3)
    # Small integers over 8: their float32 sums and products are exact, so one rounding is the only right answer.
    x, y = (torch.randint(-16, 17, (16, 16), generator=generator).div(8).bfloat16() for _ in range(2))
    results = {"as shipped": {"dot": largest(dot(x, y, "ieee"), x.float() @ y.float())}}
    repair()
    results["bfloat16"] = bfloat16_operations(x, y)
    results["bfloat16"]["dot"] = largest(dot(x, y, "ieee"), x.float() @ y.float())
    repair(emulate_tf32=True)
    a, b = (torch.randn(32, 32, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    scale = exact.abs().max().item()
    results["float32 dot"] = {p: largest(dot(a, b, p), exact) / scale for p in ("ieee", "tf32", "tf32x3")}
    one = 1 + 2.0**-10
    ties = np.array([1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12, 1 + 3 * 2.0**-12, np.inf], dtype=np.float32)
    results["tf32 rounding"] = round_to_tf32(ties).tolist() == [one, -one, 1.0, one, float("inf")]
    with count_written_bytes() as written:
        masked_store_kernel[(1,)](torch.empty(128, dtype=torch.bfloat16), 100)
    results["written bytes"] = written.total
    print(json.dumps(results))

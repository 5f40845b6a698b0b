"""Matrix instructions against element-by-element formulas of the PTX ISA manual, with a plain product in between."""

import numpy as np
import pytest

from emulator_cases import run
from mdn.bench.emulator.machine import bfloat16_to_float32, float32_to_bfloat16
from mdn.bench.emulator.tensor_cores import descriptor_offsets

RNG = np.random.default_rng(0)


def numbers(*shape):
    """Small integers: exact in every format, so that sums are exact too."""
    return RNG.integers(-8, 9, shape).astype(np.float32)


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """Unsigned bits of the elements."""
    return {"bf16": float32_to_bfloat16, "f16": lambda y: y.astype(np.float16).view(np.uint16)}[kind](x)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_m16n8k16(kind):
    A, B, D = numbers(16, 16), numbers(16, 8), numbers(16, 8)
    inputs, outputs = np.zeros((32, 10), np.uint32), np.zeros((32, 4), np.float32)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(8):  # a0..a7: the manual's row and column of element i
            row = group if i % 4 < 2 else group + 8
            column = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            inputs[lane, i // 2] |= np.uint32(encode(A[row, column : column + 1], kind)[0]) << np.uint32(16 * (i % 2))
        for i in range(4):
            row = thread * 2 + (i & 1) + (8 if i >= 2 else 0)
            inputs[lane, 4 + i // 2] |= np.uint32(encode(B[row, group : group + 1], kind)[0]) << np.uint32(16 * (i % 2))
        for i in range(4):
            row, column = group + 8 * (i // 2), thread * 2 + (i & 1)
            inputs[lane, 6 + i] = D[row, column : column + 1].view(np.uint32)[0]
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd4 + {4 * i}];" for i in range(10))
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
    product += "{%r30, %r31, %r32, %r33}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};"
    run(loads + product + "st.global.v4.b32 [%rd6], {%r30, %r31, %r32, %r33};", inputs, outputs)
    expected = A @ B + D
    for lane in range(32):
        for i in range(4):
            assert outputs[lane, i] == expected[lane // 4 + 8 * (i // 2), lane % 4 * 2 + (i & 1)]


def test_mma_m16n8k8_in_tf32_drops_low_bits_of_operands():
    A, B = numbers(16, 8), numbers(8, 8)
    dirty = (A.view(np.uint32) | np.uint32(0x1FFF)).view(np.float32)  # bits that the tensor core ignores
    inputs, outputs = np.zeros((32, 6), np.float32), np.zeros((32, 4), np.float32)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        inputs[lane, :4] = [dirty[group + 8 * (i % 2), thread + 4 * (i // 2)] for i in range(4)]
        inputs[lane, 4:] = [B[thread + 4 * i, group] for i in range(2)]
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd4 + {4 * i}];" for i in range(6))
    zeros = "mov.b32 %r20, 0;"
    product = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r30, %r31, %r32, %r33}, "
    product += "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r20, %r20, %r20};"
    run(loads + zeros + product + "st.global.v4.b32 [%rd6], {%r30, %r31, %r32, %r33};", inputs, outputs)
    expected = A @ B
    for lane in range(32):
        for i in range(4):
            assert outputs[lane, i] == expected[lane // 4 + 8 * (i // 2), lane % 4 * 2 + (i & 1)]


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_and_stmatrix(transposed):
    """Matrix i is given by the row addresses of lanes 8 i to 8 i + 7."""
    matrices = RNG.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    inputs, outputs = matrices.reshape(32, 8).copy(), np.zeros((32, 12), np.uint32)
    body = f"""
      ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4];
      shl.b32 %r9, %r1, 4;
      st.shared.v4.b32 [%r9], {{%r10, %r11, %r12, %r13}};
      bar.warp.sync -1;
      ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r9];
      st.global.v4.b32 [%rd6], {{%r20, %r21, %r22, %r23}};
      stmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 [%r9 + 512], {{%r20, %r21, %r22, %r23}};
      bar.warp.sync -1;
      ld.shared.v4.b32 {{%r24, %r25, %r26, %r27}}, [%r9 + 512];
      st.global.v4.b32 [%rd6 + 16], {{%r24, %r25, %r26, %r27}};
    """
    program = run(body, inputs, outputs, shared_bytes=1024, check=True)
    assert not program.races
    for lane in range(32):
        for i in range(4):
            matrix = matrices[i].T if transposed else matrices[i]
            pair = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            assert outputs[lane, i] == pair[0] | np.uint32(pair[1]) << np.uint32(16)
    assert (outputs[:, 4:8] == inputs.view(np.uint32)).all()  # storing undoes loading


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_descriptors_address_every_element_once(mode, transposed):
    """A tile that fills its atoms covers rows * k elements of distinct bytes, whatever the swizzle."""
    width = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    rows, k = (width // 2, 8) if transposed else (8, width // 2)
    offsets = descriptor_offsets(mode << 62 | 64 << 16 | 64 << 32, rows, k, 2, transposed, "test")
    assert sorted(offsets.ravel()) == list(range(0, rows * k * 2, 2))
    plain = np.arange(rows * k).reshape(rows, k) if not transposed else np.arange(rows * k).reshape(k, rows).T
    if mode == 0:
        assert (offsets == 2 * plain).all()
    else:  # 16-byte units move inside their line of 128 bytes only
        assert (offsets // 128 == 2 * plain // 128).all()
        assert (offsets % 16 == 2 * plain % 16).all()


@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma_multiplies_tiles_of_shared_memory(a_in_registers):
    A, B = numbers(64, 16), numbers(8, 16)  # B is stored with n as rows, k contiguous
    shared = np.zeros((128, 16), np.uint16)  # 4096 bytes: A, then B; each thread stores one row of 32 bytes
    a_offsets = descriptor_offsets(8 << 16 | 16 << 32, 64, 16, 2, False, "") // 2
    b_offsets = descriptor_offsets(128 | 8 << 16 | 16 << 32, 8, 16, 2, False, "") // 2
    flat = shared.reshape(-1)
    flat[a_offsets] = float32_to_bfloat16(A)
    flat[b_offsets] = float32_to_bfloat16(B)
    inputs, outputs = np.zeros((128, 12), np.uint32), np.zeros((128, 4), np.float32)
    inputs[:, :8] = shared.view(np.uint32)
    for thread in range(128):  # the fragment of A that mma.sync would take, 16 rows per warp
        row = 16 * (thread // 32) + thread % 32 // 4
        for i in range(4):
            r, c = row + 8 * (i % 2), 2 * (thread % 4) + 8 * (i // 2)
            inputs[thread, 8 + i] = float32_to_bfloat16(A[r, c : c + 2]).view(np.uint32)[0]
    a = "{%r18, %r19, %r20, %r21}" if a_in_registers else "%rd10"
    flags = "1, 1, 0" if a_in_registers else "1, 1, 0, 0"
    body = f"""
      ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4];
      ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%rd4 + 16];
      ld.global.v4.b32 {{%r18, %r19, %r20, %r21}}, [%rd4 + 32];
      shl.b32 %r9, %r1, 5;
      st.shared.v4.b32 [%r9], {{%r10, %r11, %r12, %r13}};
      st.shared.v4.b32 [%r9 + 16], {{%r14, %r15, %r16, %r17}};
      fence.proxy.async.shared::cta;
      bar.sync 0;
      mov.b64 %rd10, {8 << 16 | 16 << 32};
      mov.b64 %rd11, {128 | 8 << 16 | 16 << 32};
      wgmma.fence.sync.aligned;
      wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r30, %r31, %r32, %r33}}, {a}, %rd11, 0, {flags};
      wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r30, %r31, %r32, %r33}}, {a}, %rd11, 1, {flags};
      wgmma.commit_group.sync.aligned;
      wgmma.wait_group.sync.aligned 0;
      st.global.v4.b32 [%rd6], {{%r30, %r31, %r32, %r33}};
    """
    program = run(body, inputs, outputs, threads=128, shared_bytes=4096, check=True)
    assert not program.races
    expected = 2 * (A @ B.T)  # the second product adds to the first
    for thread in range(128):
        for r in range(4):
            row = 16 * (thread // 32) + 8 * (r // 2) + thread % 32 // 4
            assert outputs[thread, r] == expected[row, 2 * (thread % 4) + r % 2]


def test_sums_of_wgmma_are_nan_before_the_wait():
    zeros = np.zeros((128, 8), np.uint32)
    outputs = np.zeros((128, 1), np.uint32)
    body = """
      mov.b64 %rd10, 68719476736;
      wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r30, %r31, %r32, %r33}, %rd10, %rd10, 0, 1, 1, 0, 0;
      wgmma.commit_group.sync.aligned;
      st.global.b32 [%rd6], %r30;
    """
    run(body, zeros, outputs, threads=128, shared_bytes=4096)
    assert np.isnan(outputs.view(np.float32)).all()


def test_bfloat16_round_trip():
    x = RNG.normal(size=100).astype(np.float32)
    assert (np.abs(bfloat16_to_float32(float32_to_bfloat16(x)) - x) <= np.abs(x) * 2**-8).all()

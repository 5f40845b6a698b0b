"""The race detector: each missing barrier, wait or fence is reported, and correct code is not.

The exhaustive check, which the mutants of our kernels are held to, must say the same by itself.
"""

import numpy as np
import pytest

from emulator_cases import run
from mdn.bench.emulator.exhaustive import UNORDERED

TWO_WARPS = """
  shl.b32 %r9, %r1, 2;
  st.shared.b32 [%r9], %r1;
  {first}
  xor.b32 %r8, %r9, {partner};
  ld.shared.b32 %r20, [%r8];
  {second}
  st.shared.b32 [%r9], %r20;
  st.global.b32 [%rd6], %r20;
"""


def both_checks(body: str, threads: int, words: int = 1) -> tuple[list[str], list[str]]:
    """What the race detectors report, and what the comparison of all pairs of accesses does."""
    rows = np.zeros((threads, words), np.uint32)
    found = run(body, rows, rows.copy(), threads=threads, shared_bytes=4096, check="exhaustive").races
    return sorted(x for x in found if not x.startswith(UNORDERED)), [x for x in found if x.startswith(UNORDERED)]


def races(body: str, threads: int = 64, words: int = 1) -> list[str]:
    found, pairs = both_checks(body, threads, words)
    assert bool(found) == bool(pairs), (found, pairs)
    return found


def test_an_exchange_between_warps_needs_both_barriers():
    both = TWO_WARPS.format(first="bar.sync 0;", second="bar.sync 0;", partner=128)
    assert races(both) == []
    missing_first = races(TWO_WARPS.format(first="", second="bar.sync 0;", partner=128))
    assert missing_first
    assert "read after write without a barrier" in missing_first[0]
    missing_second = races(TWO_WARPS.format(first="bar.sync 0;", second="", partner=128))
    assert missing_second
    assert "write after read without a barrier" in missing_second[0]


def test_an_exchange_inside_a_warp_needs_a_warp_barrier():
    assert races(TWO_WARPS.format(first="bar.warp.sync -1;", second="bar.warp.sync -1;", partner=4)) == []
    assert "bar.warp.sync" in races(TWO_WARPS.format(first="", second="bar.warp.sync -1;", partner=4))[0]
    assert "bar.warp.sync" in races(TWO_WARPS.format(first="bar.warp.sync -1;", second="", partner=4))[0]


@pytest.mark.parametrize(("partner", "barrier"), [(4, "bar.warp.sync -1;"), (128, "bar.sync 0;")])
def test_two_writes_to_one_place_need_a_barrier(partner, barrier):
    body = "shl.b32 %r9, %r1, 2; st.shared.b32 [%r9], %r1; {barrier} xor.b32 %r8, %r9, {partner};"
    body += "st.shared.b32 [%r8], %r1;"
    assert races(body.format(partner=partner, barrier=barrier)) == []
    assert "write after write" in races(body.format(partner=partner, barrier=""))[0]


def test_a_warp_barrier_does_not_order_two_warps():
    assert races(TWO_WARPS.format(first="bar.warp.sync -1;", second="bar.sync 0;", partner=128))


def test_the_exhaustive_check_remembers_every_reader_of_a_warp():
    """The race detector remembers one: the reader of the last instruction, who is the one that writes."""
    body = """
      shl.b32 %r9, %r1, 2;
      st.shared.b32 [%r9], %r1;
      bar.sync 0;
      setp.eq.b32 %p1, %r1, 0;
      setp.eq.b32 %p2, %r1, 1;
      mov.b32 %r8, 0;
      @%p1 ld.shared.b32 %r20, [%r8];
      @%p2 ld.shared.b32 %r20, [%r8];
      @%p2 st.shared.b32 [%r8], %r1;
    """
    found, pairs = both_checks(body, threads=32)
    assert not found
    assert len(pairs) == 1


def test_reading_what_was_never_written_is_reported():
    found, _ = both_checks("mov.b32 %r9, 64; ld.shared.b32 %r20, [%r9];", threads=64)
    assert "never written" in found[0]


COPY = """
  shl.b32 %r9, %r1, 4;
  cp.async.cg.shared.global [ %r9 + 0 ], [ %rd4 + 0 ], 0x10;
  cp.async.commit_group;
  {wait}
  {barrier}
  xor.b32 %r8, %r9, {partner};
  ld.shared.b32 %r20, [%r8];
"""


@pytest.mark.parametrize("partner", [0, 16, 512], ids=["own bytes", "same warp", "other warp"])
def test_what_a_copy_brings_needs_a_wait_and_a_barrier(partner):
    def found(wait: str = "cp.async.wait_group 0;", barrier: str = "bar.sync 0;") -> list[str]:
        return races(COPY.format(wait=wait, barrier=barrier, partner=partner), words=4)

    assert found() == []
    assert "copy in flight" in found(wait="")[0]
    assert bool(found(barrier="")) == (partner != 0)


def test_a_copy_must_not_overtake_a_read():
    body = """
      shl.b32 %r9, %r1, 4;
      st.shared.b32 [%r9], %r1;
      bar.sync 0;
      xor.b32 %r8, %r9, 512;
      ld.shared.b32 %r20, [%r8];
      {barrier}
      cp.async.cg.shared.global [ %r9 + 0 ], [ %rd4 + 0 ], 0x10;
      cp.async.commit_group;
    """
    assert races(body.format(barrier="bar.sync 0;"), words=4) == []
    assert "write after read" in races(body.format(barrier=""), words=4)[0]


WGMMA = """
  shl.b32 %r9, %r1, 5;
  st.shared.v4.b32 [%r9], {{%r1, %r1, %r1, %r1}};
  st.shared.v4.b32 [%r9 + 16], {{%r1, %r1, %r1, %r1}};
  {fence}
  {barrier}
  mov.b64 %rd10, {descriptor};
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r10, %r11, %r12, %r13}}, %rd10, %rd10, 0, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  {wait}
  {last_barrier}
  st.shared.v4.b32 [%r9], {{%r10, %r11, %r12, %r13}};
  st.global.b32 [%rd6], %r10;
"""
NO_SWIZZLE = 8 << 16 | 16 << 32
"""a descriptor: 8 x 16-byte atoms, 128 bytes to the leading neighbour, 256 to the next eight rows"""


@pytest.mark.parametrize(
    ("missing", "reported"),
    [
        (None, None),
        ("fence", "no proxy fence"),
        ("barrier", "without a barrier since"),
        ("wait", "wgmma in flight reads"),
        ("last_barrier", "write after read without a barrier"),
        ("barrier after the wait", "write after read without a barrier"),
    ],
)
def test_wgmma_needs_a_fence_a_barrier_a_wait_and_another_barrier(missing, reported):
    parts = {
        "fence": "fence.proxy.async.shared::cta;",
        "barrier": "bar.sync 0;",
        "wait": "wgmma.wait_group.sync.aligned 0;",
        "last_barrier": "bar.sync 0;",
    }
    if missing == "barrier after the wait":  # each warp has waited, but not for the others
        parts["wait"], parts["last_barrier"] = parts["last_barrier"], parts["wait"]
    elif missing:
        parts[missing] = ""
    found = races(WGMMA.format(descriptor=NO_SWIZZLE, **parts), threads=128)
    assert (found == []) if missing is None else any(reported in race for race in found), found


SUMS, OPERAND = "{%r10, %r11, %r12, %r13}", "{%r14, %r15, %r16, %r17}"
KIND = "f32.bf16.bf16"
FENCE = "wgmma.fence.sync.aligned;"
WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n8k16.{KIND} {SUMS}, %rd10, %rd10, 1, 1, 1, 0, 0;"
WIDER = (
    f"wgmma.mma_async.sync.aligned.m64n16k16.{KIND} {SUMS[:-1]}, %r20, %r21, %r22, %r23}}, %rd10, %rd10, 1, 1, 1, 0, 0;"
)
FROM_REGISTERS = f"wgmma.mma_async.sync.aligned.m64n8k16.{KIND} {SUMS}, {OPERAND}, %rd10, 1, 1, 1, 0;"


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ("{fence} {product} {wait}", "adds to registers"),
        ("{FENCE} {product} {wait} mul.f32 %r12, %r12, 0f3F000000; {fence} {product} {wait}", "adds to registers"),
        ("{FENCE} {product} {wait} mov.b32 %r30, %r10; {fence} {product} {wait}", "adds to registers"),
        ("{FENCE} {product} {fence} {wider} {wait}", "adds to registers"),
        ("{FENCE} {product} {wait} mov.b32 %r14, %r2; {fence} {from_registers} {wait}", "reads registers"),
        ("{FENCE} {product} {product} {wait} {product} {wait} mov.b32 %r30, %r31; {product} {wait}", None),
        (
            "{FENCE} {product} {wait} setp.eq.b32 %p1, %r1, 77; @%p1 mov.b32 %r10, 0; {fence} {product} {wait}",
            "adds to",
        ),
        ("{FENCE} {product} {wait} setp.eq.b32 %p1, %r1, 999; @%p1 mov.b32 %r10, 0; {product} {wait}", None),
    ],
    ids=["first", "written", "read", "other shape", "A in registers", "same sums", "one lane wrote", "no lane wrote"],
)
def test_wgmma_needs_a_fence_after_other_instructions_have_used_its_registers(body, reported):
    parts = {"FENCE": FENCE, "product": PRODUCT, "wider": WIDER, "from_registers": FROM_REGISTERS, "wait": WAIT}
    begin = "shl.b32 %r9, %r1, 5; st.shared.v4.b32 [%r9], {%r1, %r1, %r1, %r1}; st.shared.v4.b32 [%r9 + 16], "
    begin += f"{{%r1, %r1, %r1, %r1}}; fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %rd10, {NO_SWIZZLE};"
    rows = np.zeros((128, 1), np.uint32)

    def found(fence: str) -> list[str]:
        text = begin + body.format(fence=fence, **parts)
        return list(run(text, rows, rows.copy(), threads=128, shared_bytes=4096, check=True).races)

    assert found(FENCE) == []
    missing = found("")
    assert missing == [] if reported is None else any(reported in race for race in missing), missing


THROUGH_GLOBAL_MEMORY = """
  st.global.b32 [%rd6], %r1;
  {barrier}
  xor.b32 %r8, %r1, 32;
  mul.wide.u32 %rd8, %r8, 4;
  add.s64 %rd9, %rd2, %rd8;
  ld.global.b32 %r20, [%rd9];
"""


def test_an_exchange_through_global_memory_needs_a_barrier_too():
    assert races(THROUGH_GLOBAL_MEMORY.format(barrier="bar.sync 0;")) == []
    assert "read after write without a barrier" in races(THROUGH_GLOBAL_MEMORY.format(barrier=""))[0]


def test_programs_must_not_touch_what_another_one_writes():
    rows = np.zeros((64, 1), np.uint32)

    def found(body):
        return sorted(run(body, rows, rows.copy(), threads=64, grid=(3,), check=True).races)

    assert found("ld.global.b32 %r20, [%rd4];") == []
    assert "write to what another program writes" in found("st.global.b32 [%rd6], %r1;")[-1]
    only_one_writes = "mov.u32 %r2, %ctaid.x; setp.eq.b32 %p1, %r2, {writer}; @%p1 st.global.b32 [%rd6], %r1;"
    others_read = only_one_writes + " @!%p1 ld.global.b32 %r20, [%rd6];"
    assert any("what another program" in race for race in found(others_read.format(writer=0)))
    assert any("what another program" in race for race in found(others_read.format(writer=2)))

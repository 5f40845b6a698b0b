"""Each family of instructions against a few lines written from the PTX ISA manual."""

import numpy as np
import pytest

from emulator_cases import on_words, run
from mdn.bench.emulator import Fault
from mdn.bench.emulator.machine import float32_to_bfloat16

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 2**32, (3, 32), dtype=np.uint32)
WORDS[0, :6] = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x80000001]
FLOATS = RNG.normal(size=(3, 32)).astype(np.float32)


def signed(x):
    return x.astype(np.int32).astype(np.int64)


# ------------------------------------------------------------------------------------------------ integers and bits


def test_addition_and_subtraction_wrap():
    a, b = WORDS[:2]
    assert (on_words("add.s32 %r20, %r10, %r11;", a, b) == a + b).all()
    assert (on_words("sub.s32 %r20, %r10, %r11;", a, b) == a - b).all()


def test_a_wide_product_keeps_the_sign_of_a_signed_type():
    a, b = WORDS[:2]
    high = "mul.wide.{0}32 %rd10, %r10, %r11; shr.u64 %rd11, %rd10, 32; cvt.u32.u64 %r20, %rd11;"
    assert (on_words(high.format("s"), a, b) == (signed(a) * signed(b) >> 32).astype(np.uint32)).all()
    assert (on_words(high.format("u"), a, b) == (a.astype(np.uint64) * b >> 32).astype(np.uint32)).all()
    assert (on_words("mul.hi.u32 %r20, %r10, %r11;", a, b) == (a.astype(np.uint64) * b >> 32).astype(np.uint32)).all()
    assert (on_words("mad.lo.s32 %r20, %r10, %r11, 7;", a, b) == a * b + np.uint32(7)).all()


def test_division_rounds_towards_zero():
    a, b = WORDS[0], np.where(WORDS[1] % 7 == 0, 3, WORDS[1] % 7).astype(np.uint32)
    expected = np.trunc(signed(a) / signed(b)).astype(np.int64)
    assert (on_words("div.s32 %r20, %r10, %r11;", a, b, result=np.int32) == expected).all()
    assert (on_words("rem.s32 %r20, %r10, %r11;", a, b, result=np.int32) == signed(a) - expected * signed(b)).all()


def test_shifts_past_the_width_give_zero_or_the_sign():
    a, by = WORDS[0], np.arange(32, dtype=np.uint32) * 2
    past = by > 31
    by_in_range = np.minimum(by, 31)
    assert (on_words("shl.b32 %r20, %r10, %r11;", a, by) == np.where(past, 0, a << by_in_range)).all()
    assert (on_words("shr.u32 %r20, %r10, %r11;", a, by) == np.where(past, 0, a >> by_in_range)).all()
    assert (on_words("shr.s32 %r20, %r10, %r11;", a, by, result=np.int32) == signed(a) >> by_in_range).all()


def test_bit_fields():
    a, b = WORDS[:2]
    assert (on_words("bfe.u32 %r20, %r10, 5, 7;", a) == (a >> 5 & 127)).all()
    field = (signed(a) >> 5) & 127
    assert (on_words("bfe.s32 %r20, %r10, 5, 7;", a, result=np.int32) == np.where(field > 63, field - 128, field)).all()
    expected = (b & ~np.uint32(0xFF0)) | (a & 0xFF) << 4
    assert (on_words("bfi.b32 %r20, %r10, %r11, 4, 8;", a, b) == expected).all()


def test_byte_permute_picks_bytes_of_both_words():
    a, b = WORDS[:2]
    both = np.stack([a, b], 1).view(np.uint8)
    expected = both[:, [1, 0, 7, 6]].copy().view(np.uint32).ravel()  # the lowest nibble selects the lowest byte
    assert (on_words("prmt.b32 %r20, %r10, %r11, 0x6701;", a, b) == expected).all()


def test_lop3_is_a_truth_table_and_shf_a_shift_of_64_bits():
    a, b, c = WORDS
    assert (on_words("lop3.b32 %r20, %r10, %r11, %r12, 0x96;", a, b, c) == a ^ b ^ c).all()
    expected = ((b.astype(np.uint64) << 32 | a) << 9 >> 32).astype(np.uint32)
    assert (on_words("shf.l.wrap.b32 %r20, %r10, %r11, 9;", a, b) == expected).all()


def test_comparisons_follow_the_type():
    a, b = WORDS[:2]
    select = "setp.lt.{0}32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;"
    assert (on_words(select.format("u"), a, b) == (a < b)).all()
    assert (on_words(select.format("s"), a, b) == (signed(a) < signed(b))).all()


# ------------------------------------------------------------------------------------------------ floats


def test_fma_rounds_once():
    a = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, -1 - 2**-11, np.float32)  # a * a = 1 + 2^-11 + 2^-24: the last term survives only without rounding
    assert (on_words("fma.rn.f32 %r20, %r10, %r10, %r11;", a, c, result=np.float32) == np.float32(2**-24)).all()
    twice = "mul.f32 %r15, %r10, %r10; add.f32 %r20, %r15, %r11;"
    assert (on_words(twice, a, c, result=np.float32) == 0).all()


def test_comparisons_with_nan():
    a, b = FLOATS[0].copy(), FLOATS[1]
    a[3] = np.nan
    for compare, expected in (("lt", a < b), ("geu", ~(a < b)), ("nan", np.isnan(a)), ("ne", (a != b) & ~np.isnan(a))):
        body = f"setp.{compare}.f32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;"
        assert (on_words(body, a, b) == expected).all(), compare


def test_minimum_ignores_nan_and_functions_are_those_of_numpy():
    a = np.abs(FLOATS[0]).copy()
    a[5] = np.nan
    assert (on_words("min.f32 %r20, %r10, %r11;", a, FLOATS[1], result=np.float32) == np.fmin(a, FLOATS[1])).all()
    for name, function in (("ex2.approx.ftz", np.exp2), ("lg2.approx", np.log2), ("sqrt.rn", np.sqrt)):
        result = on_words(f"{name}.f32 %r20, %r10;", a, result=np.float32)
        np.testing.assert_array_equal(result, function(a))


def test_conversions_round_as_the_manual_says():
    a = np.array([1.5, 2.5, -1.5, -2.7] * 8, np.float32)
    assert (on_words("cvt.rzi.s32.f32 %r20, %r10;", a, result=np.int32) == np.trunc(a)).all()
    assert (on_words("cvt.rni.s32.f32 %r20, %r10;", a, result=np.int32) == np.rint(a)).all()
    pair = on_words("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", FLOATS[0], FLOATS[1])
    assert (pair >> 16 == float32_to_bfloat16(FLOATS[0])).all()  # the first operand is the upper half
    assert (pair & 0xFFFF == float32_to_bfloat16(FLOATS[1])).all()
    ties = np.full(32, 1 + 2**-8, np.float32)  # halfway between two bfloat16: to even
    assert (float32_to_bfloat16(ties) == 0x3F80).all()
    rounded = on_words("cvt.rna.tf32.f32 %r20, %r10;", FLOATS[0], result=np.float32)
    assert (np.abs(rounded - FLOATS[0]) <= np.abs(FLOATS[0]) * 2**-11).all()
    assert (rounded.view(np.uint32) & 0x1FFF == 0).all()


# ------------------------------------------------------------------------------------------------ warps


@pytest.mark.parametrize(
    ("mode", "amount", "clamp", "expected"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("up", 3, 0, lambda lane: np.where(lane >= 3, lane - 3, lane)),
        ("down", 3, 31, lambda lane: np.where(lane <= 28, lane + 3, lane)),
        ("idx", 6, 31, lambda lane: np.full(32, 6)),
        ("up", 1, 0x1800, lambda lane: np.where(lane % 8 >= 1, lane - 1, lane)),  # segments of eight lanes
    ],
)
def test_shuffles(mode, amount, clamp, expected):
    lane = np.arange(32)
    result = on_words(f"shfl.sync.{mode}.b32 %r20, %r10, {amount}, {clamp}, -1;", WORDS[0])
    assert (result == WORDS[0][expected(lane)]).all()


def test_reductions_over_a_warp():
    smallest = on_words("redux.sync.min.s32 %r20, %r10, -1;", WORDS[0], result=np.int32)
    assert (smallest == signed(WORDS[0]).min()).all()
    assert (on_words("redux.sync.xor.b32 %r20, %r10, -1;", WORDS[0]) == np.bitwise_xor.reduce(WORDS[0])).all()


def test_lanes_that_part_ways_meet_again():
    body = """
      setp.lt.u32 %p1, %r1, 10;
      mov.b32 %r21, 0;
      @%p1 bra $SMALL;
      mov.b32 %r20, 100;
      bra.uni $JOIN;
    $SMALL:
      mov.b32 %r20, 200;
      add.s32 %r21, %r21, 1;
      setp.lt.u32 %p2, %r21, %r1;
      @%p2 bra $SMALL;
    $JOIN:
      add.s32 %r20, %r20, %r21;
    """
    lane = np.arange(32)
    assert (on_words(body, WORDS[0]) == np.where(lane < 10, 200 + np.maximum(lane, 1), 100)).all()


def test_a_guard_protects_what_it_skips():
    body = "mov.b32 %r20, 1; setp.eq.s32 %p1, %r1, 4; @%p1 mov.b32 %r20, 2; @!%p1 add.s32 %r20, %r20, 5;"
    assert (on_words(body, WORDS[0]) == np.where(np.arange(32) == 4, 2, 6)).all()


def test_a_barrier_that_some_threads_never_reach_is_a_fault():
    body = """
      setp.lt.u32 %p1, %r1, 32;
      @%p1 bra $TWICE;
      bar.sync 0;
      bra.uni $END;
    $TWICE:
      bar.sync 0;
      bar.sync 0;
      setp.eq.s32 %p2, %r1, 77;
      @%p2 bra $TWICE;
    $END:
      bar.sync 0;
      bar.sync 0;
    """
    rows = np.zeros((64, 1), np.uint32)
    run(body, rows, rows.copy(), threads=64)  # threads that have returned do not hold others up
    with pytest.raises(Fault, match="some threads only"):
        run("bar.sync 1, 32;", rows, rows.copy(), threads=64)


# ------------------------------------------------------------------------------------------------ memory


def test_vector_loads_and_small_types():
    inputs = RNG.integers(0, 256, (32, 16), dtype=np.uint8)
    outputs = np.zeros((32, 4), np.uint32)
    body = """
      ld.global.v2.b32 {%r10, %r11}, [%rd4 + 8];
      ld.global.s8 %rs1, [%rd4 + 1];
      cvt.s32.s16 %r12, %rs1;
      ld.global.u16 %rs2, [%rd4 + 2];
      cvt.u32.u16 %r13, %rs2;
      st.global.v4.b32 [%rd6], {%r10, %r11, %r12, %r13};
    """
    run(body, inputs, outputs)
    words = inputs.view(np.uint32)
    assert (outputs[:, :2] == words[:, 2:]).all()
    assert (outputs[:, 2].view(np.int32) == inputs[:, 1].view(np.int8)).all()
    assert (outputs[:, 3] == inputs[:, 2:4].copy().view(np.uint16).ravel()).all()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("ld.global.b32 %r20, [%rd4 + 128];", "outside every tensor"),
        ("ld.global.b32 %r20, [%rd4 + 2];", "misaligned"),
        ("mov.b64 %rd9, 0; ld.global.b32 %r20, [%rd9];", "out of range"),
        ("mov.b32 %r9, 200; ld.shared.b32 %r20, [%r9];", "outside of 128 bytes"),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 shfl.sync.bfly.b32 %r20, %r1, 1, 31, -1;", "part of a warp"),
        ("frobnicate.b32 %r20, %r1;", "not emulated"),
    ],
)
def test_what_a_gpu_would_trap_on_is_a_fault(body, reason):
    rows = np.zeros((32, 1), np.uint32)
    with pytest.raises(Fault, match=reason):
        run(body, rows, rows.copy(), shared_bytes=128)


COPY = """
  shl.b32 %r9, %r1, 4;
  cp.async.cg.shared.global [%r9], [%rd4], 16, {kept};
  cp.async.commit_group;
  {wait}
  bar.sync 0;
  ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r9];
  st.global.v4.b32 [%rd6], {{%r10, %r11, %r12, %r13}};
"""


def test_an_asynchronous_copy_lands_at_the_wait_and_fills_with_zeros():
    inputs, outputs = RNG.integers(0, 2**32, (32, 4), dtype=np.uint32), np.zeros((32, 4), np.uint32)
    program = run(COPY.format(kept=8, wait="cp.async.wait_group 0;"), inputs, outputs, shared_bytes=512, check=True)
    assert (outputs[:, :2] == inputs[:, :2]).all()
    assert (outputs[:, 2:] == 0).all()
    assert not program.races


def test_a_copy_that_is_not_waited_for_is_nan_and_a_race():
    inputs, outputs = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    program = run(COPY.format(kept=16, wait="cp.async.wait_group 1;"), inputs, outputs, shared_bytes=512, check=True)
    assert np.isnan(outputs.view(np.float32)).all()
    assert any("copy in flight" in race for race in program.races)


def test_wavefronts_count_bank_conflicts_and_sectors_count_distinct_lines():
    rows = np.zeros((32, 8), np.uint32)
    body = "shl.b32 %r9, %r1, {shift}; st.shared.b32 [%r9], %r1; ld.global.b32 %r10, [%rd4];"
    free = run(body.format(shift=2), rows, rows.copy(), shared_bytes=4096, count=True).counts
    assert (free.wavefronts(), free.wavefronts(without_conflicts=True)) == (1, 1)
    assert (free.sectors("load"), free.sectors("load", distinct=True)) == (32, 32)  # rows of 32 bytes
    conflicts = run(body.format(shift=7), rows, rows.copy(), shared_bytes=4096, count=True).counts
    assert (conflicts.wavefronts(), conflicts.wavefronts(without_conflicts=True)) == (32, 1)


def test_a_sector_that_two_source_lines_touch_counts_once_for_the_kernel_and_once_for_each_line():
    rows = np.zeros((32, 8), np.uint32)
    load = "\n.loc 1 {} 1\nld.global.b32 %r10, [%rd4];\n"  # a line of a file without a name
    body = load.format(7) + load.format(7) + load.format(8)
    counts = run(body, rows, rows.copy(), count=True).counts
    assert (counts.sectors("load"), counts.sectors("load", distinct=True)) == (96, 32)
    for place in ("?:7", "?:8"):
        assert counts.memory_by_place[place]["global load distinct sectors"] == 32


def test_a_load_with_a_hint_for_the_cache_is_a_load():
    a = WORDS[0]
    body = "createpolicy.fractional.L2::evict_last.b64 %rd10, 1.0;\n"
    body += "ld.global.L2::evict_last.L2::cache_hint.b32 %r20, [%rd4], %rd10;"
    assert (on_words(body, a) == a).all()

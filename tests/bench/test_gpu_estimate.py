"""Static timelines and estimated times, on machine code of a few lines."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("triton")

from mdn.bench.emulator.execute import Counts
from mdn.bench.gpu import estimate
from mdn.bench.gpu.compiling import Resources
from mdn.bench.gpu.counts import figures_of_line
from mdn.bench.gpu.runs import Size
from mdn.bench.gpu.timeline import BARRIER, LATENCY, UNKNOWN_TURNS, Timeline, parse, walk

NO_BOARD = 7


def line(text: str, stall: int = 1, signals: int = NO_BOARD, waits: int = 0) -> str:
    """An instruction as `nvdisasm -c -hex` prints it. ``waits`` is a mask of scoreboards."""
    control = stall << 41 | signals << 46 | NO_BOARD << 49 | waits << 52
    return f"        /*0000*/  {text} ;  /* 0x{0:016x} */\n    /* 0x{control:016x} */"


def walked(*lines: str) -> Timeline:
    return walk(parse("\n".join((*lines, line("EXIT")))))


def test_stall_counts_add_up():
    found = walked(line("MOV R1, 0x1", stall=4), line("FADD R2, R2, R3", stall=2))
    assert found.cycles == 4 + 2 + 1
    assert found.issued == 3


def test_an_instruction_waits_for_the_scoreboard_of_a_load():
    found = walked(line("LDG.E.128 R4, [R2]", signals=0), line("FADD R8, R4, R5", waits=1))
    assert found.cycles == LATENCY["LDG"] + 1 + 1
    assert found.bytes_moved == 32 * 16


def test_only_loads_behind_a_wait_count_as_late():
    early = walked(
        line("LDG.E R4, [R2]", signals=0), line("LDG.E R5, [R2]", signals=1), line("FADD R8, R4, R5", waits=3)
    )
    late = walked(
        line("LDG.E R4, [R2]", signals=0), line("FADD R8, R4, R4", waits=1), line("LDG.E R5, [R2]", signals=1)
    )
    assert (early.loads_after_a_wait, late.loads_after_a_wait) == (0, 1)


def test_a_loop_with_a_constant_bound_is_followed_as_often_as_it_turns():
    body = (
        ".L_x_1:",
        line("IADD3 R0, R0, 0x1, RZ"),
        line("ISETP.NE.AND P0, PT, R0, 0x5, PT"),
        line("@P0 BRA `(.L_x_1)"),
    )
    found = walked(line("MOV R0, RZ"), *body)
    assert found.issued == 1 + 5 * 3 + 1
    assert found.turn is None


def test_of_a_loop_whose_bound_is_not_known_the_last_turn_counts():
    body = (".L_x_1:", line("IADD3 R0, R0, 0x1, RZ", stall=9), line("ISETP.NE.AND P0, PT, R0, R9, PT"))
    found = walked(line("MOV R0, RZ"), *body, line("@P0 BRA `(.L_x_1)"))
    assert found.issued == 1 + UNKNOWN_TURNS * 3 + 1
    assert found.turn is not None
    assert (found.turn.issued, found.turn.cycles) == (3, 11)


def test_code_for_numbers_that_are_not_finite_is_not_followed():
    guard = line("FSETP.NEU.AND P0, PT, R3, RZ, PT")
    found = walked(guard, line("@!P0 BRA `(.L_x_2)"), line("LDG.E R4, [R2]"), ".L_x_2:")
    assert found.bytes_moved == 0


def test_barriers_products_and_copies_in_flight_are_counted():
    found = walked(
        line("BAR.SYNC.DEFER_BLOCKING 0x0"), line("DEPBAR.LE SB0, 0x2"), line("HMMA.16816.F32 R4, R8, R12, R4")
    )
    assert found.barriers == 1
    assert found.cycles == 1 + BARRIER + 1 + 1 + 1
    assert found.copies_in_flight == 2
    assert found.flops == 2 * 16 * 8 * 16


# ----------------------------------------------------------------------------------------------------------- estimates

GPU = estimate.Gpu(sms=10, clock=1e9, dram=1e12, l2=2e12, flops=1e14, registers=65536, shared=100_000)


def analysis(timeline: Timeline, registers: int = 128, shared: int = 20_000) -> estimate.Analysis:
    return estimate.Analysis("some", 4, Resources(registers, 0, shared, 100), timeline, 0)


def test_the_scarcest_resource_decides_how_many_blocks_an_sm_holds():
    assert analysis(Timeline()).blocks_per_sm(GPU) == 65536 // (128 * 128)
    assert analysis(Timeline(), shared=60_000).blocks_per_sm(GPU) == 1
    assert analysis(Timeline(), shared=120_000).blocks_per_sm(GPU) == 0
    assert analysis(Timeline(), registers=8, shared=0).blocks_per_sm(GPU) == 64 // 4


def test_the_terms_of_an_estimate():
    found = analysis(Timeline(cycles=1000.0, issued=200, bytes_moved=512, flops=4096))
    times = found.times(GPU, programs=80, tensor_bytes=1e5, chunks=None)
    assert times["latency"] == pytest.approx(80 / (10 * 4) * 1000 / 1e9)
    assert times["issue"] == pytest.approx(80 / (10 * 4) * 4 * 200 * 4 / 4e9)
    assert times["DRAM"] == pytest.approx(1e5 / 1e12)
    assert times["L2"] == pytest.approx(80 * 4 * 512 / 2e12)
    assert times["tensor"] == pytest.approx(80 * 4 * 4096 / 1e14)


def test_dram_moves_no_more_than_is_requested():
    found = analysis(Timeline(cycles=1.0, bytes_moved=32))
    assert found.times(GPU, programs=1, tensor_bytes=1e9, chunks=None)["DRAM"] == pytest.approx(4 * 32 / 1e12)


def test_a_scan_takes_whole_rounds_and_a_turn_per_chunk():
    found = analysis(Timeline(cycles=9.0, turn=Timeline(cycles=100.0)))
    assert found.times(GPU, programs=41, tensor_bytes=1, chunks=64)["latency"] == pytest.approx(2 * 64 * 100 / 1e9)


def test_products_whose_operand_comes_from_registers_are_found():
    from_registers = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1,%r2}, {%r3,%r4}, %rd1, p, 1, 1, 0;"
    from_shared = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1,%r2}, %rd2, %rd1, p, 1, 1, 0, 0;"
    assert estimate.register_products(f"{from_shared}\n{from_registers}\n{from_shared}") == 1


def test_every_launch_takes_the_entry_with_the_smallest_estimate(monkeypatch):
    times = [[3.0, 1.0], [2.0, 5.0], [4.0, 2.0]]
    rows = [[{"name": "a", "ms": a}, {"name": "b", "ms": b}] for a, b in times]
    monkeypatch.setattr(estimate, "_estimate_entry", lambda number, *_: (rows[number], len(rows)))
    found = estimate.estimate(lambda size, length: None, Size(1, 16, 16), "sm_90", batch=1, time=64)
    assert [row["ms"] for row in found] == [2.0, 1.0]


def test_entries_are_spread_over_the_list_and_those_that_do_not_fit_are_passed_over(monkeypatch):
    configs = list(range(31))
    monkeypatch.setattr(estimate, "_fits", lambda tuner, kwargs, config, gpu: config != 30)
    taken = [estimate.Entries(number, GPU).of(None, {}, configs)[0] for number in range(estimate.ENTRIES_TRIED)]
    assert taken == [0, 6, 12, 18, 24, 0]


def test_what_a_source_line_executes():
    run = Counts(
        opcodes_by_place={
            "a.py:1": Counter({"mma.sync.aligned.m16n8k16": 3, "bar.sync": 2, "add.s32": 5}),
            "a.py:12": Counter({"ld.shared.b32": 1}),
        },
        memory_by_place={
            "a.py:1": Counter({"global load distinct sectors": 6}),
            "a.py:1 ld.global.b32": Counter({"global load sectors": 8}),
            "a.py:1 ld.shared.b32": Counter(
                {"shared load wavefronts": 4, "shared load wavefronts without conflicts": 2}
            ),
            "a.py:12 ld.shared.b32": Counter({"shared load wavefronts": 1}),
        },
    )
    found = figures_of_line(run, "a.py:1")
    assert (found["warp_instructions"], found["mma"], found["barriers"]) == (10, 3, 2)
    assert (found["sectors"], found["sectors_distinct"]) == (8, 6)
    assert (found["wavefronts"], found["wavefronts_ideal"]) == (4, 2)

"""When the Triton backend says no, it says why; and the bench and the self-test work without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import mdn.ops.triton as kernels
from mdn.bench.kernel_bars import BARS, SHARED_LIMITS, SPILL_BAR_K128
from mdn.bench.kernels import count_launches_and_bytes
from mdn.ops.triton import availability, tiles


def test_importing_the_backend_does_not_import_triton():
    code = "import sys, mdn.ops.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cpu_tensors_are_refused_unless_the_interpreter_is_on(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "the tensors are on cpu" in kernels.why_unavailable("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.why_unavailable("cpu") is None


def test_a_missing_triton_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(availability, "triton_version", lambda: None)
    assert "pip install" in kernels.why_unavailable("cpu")


@pytest.mark.parametrize("version", [(3, 3, 1), (3, 4, 0), (3, 6, 0), (3, 7, 0)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), None])
def test_versions_before_3_7_1_are_refused_and_the_way_out_is_named(version, capability):
    reason = availability.why_refused(version, capability)
    assert "too old" in reason
    assert 'backend="torch"' in reason


def test_good_versions_are_accepted_on_hopper_and_elsewhere():
    assert availability.why_refused((3, 7, 1), (9, 0)) is None
    assert availability.why_refused((3, 7, 1), (8, 0)) is None
    assert availability.why_refused((3, 7, 1), (12, 0)) is None
    assert availability.why_refused((3, 9, 0), (10, 0)) is None
    assert availability.why_refused((3, 9, 0), None) is None


def test_gpus_before_ampere_are_refused_and_the_way_out_is_named():
    reason = availability.why_refused((3, 9, 0), (7, 5))
    assert "7.5" in reason
    assert 'backend="torch"' in reason


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_triton_3_7_is_refused_on_data_centre_blackwell_where_it_leaves_out_barriers(capability):
    assert "3.8" in availability.why_refused((3, 7, 1), capability)


def test_package_metadata_is_read_once_not_on_every_call(monkeypatch):
    kernels.why_unavailable("cpu")
    monkeypatch.setattr(availability.importlib.metadata, "version", lambda name: pytest.fail("read again"))
    kernels.why_unavailable("cpu")


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "chunk_size", "dtype", "word"),
    [
        (257, 16, 64, torch.float32, "K=257"),
        (16, 513, 64, torch.float32, "V=513"),
        (16, 16, 48, torch.float32, "chunk_size=48"),
        (16, 16, 64, torch.float64, "float64"),
        (16, 16, 64, torch.int32, "int32"),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused_by_name(monkeypatch, key_dim, value_dim, chunk_size, dtype, word):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, v = torch.zeros(1, 1, 1, key_dim, dtype=dtype), torch.zeros(1, 1, 1, value_dim, dtype=dtype)
    assert word in kernels.why_unsupported(q, v, chunk_size)


def test_the_limits_themselves_are_covered():
    q, v = torch.zeros(1, 1, 1, 256), torch.zeros(1, 1, 1, 512)
    assert all(kernels.why_unsupported(q, v, chunk) is None for chunk in (None, 16, 32, 64))


def test_tiles_do_not_depend_on_length_and_cover_every_kernel():
    for target in ("sm_80", "sm_90", "gfx942"):
        for kernel in tiles._TILES:
            for key_dim in (16, 128, 256):
                for itemsize in (2, 4):
                    tile = tiles.choose_tile(kernel, key_dim, 24, itemsize, target)
                    assert tile.value_block <= 32
                    assert tile.warps in (1, 2, 4, 8)


def test_few_sequences_get_narrower_tiles_so_that_there_are_more_programs():
    many = tiles.choose_tile("forward_states", 128, 256, 2, "sm_90", heads=48)
    few = tiles.choose_tile("forward_states", 128, 256, 2, "sm_90", heads=6)
    assert few.value_block < many.value_block


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("key_dim", [64, 128, 256])
def test_a_tile_has_fewer_warps_only_where_it_has_fewer_columns(target, itemsize, key_dim):
    """Fewer warps for the same columns would only mean more registers a thread."""
    for kernel in tiles._TILES:
        many = tiles.choose_tile(kernel, key_dim, 512, itemsize, target)
        few = tiles.choose_tile(kernel, key_dim, 512, itemsize, target, heads=1)
        assert few == many or few.value_block < many.value_block


def test_a_decoding_step_has_programs_of_one_warp():
    """With more of them, sums over K would go through shared memory, with bank conflicts and barriers."""
    sizes = ((128, 256, 6), (128, 256, 48), (256, 512, 6), (256, 512, 48))
    found = [tiles.choose_tile("decode", key_dim, value_dim, 4, "sm_90", heads=n) for key_dim, value_dim, n in sizes]
    assert [(tile.value_block, tile.warps) for tile in found] == [(8, 1), (16, 1), (8, 1), (8, 1)]


@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_120"])
def test_chunks_are_shorter_where_shared_memory_is_short(target):
    assert tiles.choose_chunk_size(64, 256, target) == 32
    assert tiles.choose_chunk_size(16, 256, target) == 16
    assert tiles.choose_chunk_size(64, 128, target) == 64
    assert tiles.choose_chunk_size(64, 256, "sm_80") == 64


def test_the_self_test_says_plainly_that_there_is_no_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "mdn.ops.triton.selftest"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if torch.cuda.is_available():
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode == 2
        assert done.stdout.startswith("no test was run: torch")
        assert done.stdout.count("\n") == 1


def test_launches_and_written_bytes_stay_under_their_bars():
    counted = count_launches_and_bytes(128, 256)
    for name in ("forward", "backward"):
        assert 0 < counted["launches"][name] <= BARS["launches"][name]
        assert 0 < counted["bytes"][name] <= BARS["bytes_K128"][name]


def compiling_process(code: str):
    """The JSON that the code prints, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def compiled(target: str, key_dim: int, value_dim: int = 256, dtype: str = "bfloat16", given_p: bool = False):
    """A row for every launch."""
    sizes = f"key_dim={key_dim}, value_dim={value_dim}, dtype=torch.{dtype}, given_p={given_p}"
    return compiling_process(
        "import json, torch\n"
        "from mdn.bench.gpu.compiling import compile_variant\n"
        "from mdn.bench.kernels import Variant\n"
        f"print(json.dumps(list(compile_variant(Variant({sizes}), {target!r}))))\n"
    )


def assert_rows_are_sound(rows: list[dict]) -> None:
    assert len(rows) == 3 + 6 + 1
    for row in rows:
        assert 16 <= row["registers"] <= 255
        assert 0 < row["shared_bytes"] <= SHARED_LIMITS[row["target"]]
        assert row["instructions"] > 100
        assert not row.get("register_products"), row["name"]  # ptxas before 13.3 may overwrite such registers


def assert_widths_of_the_paper_are_fast(rows: list[dict]) -> None:
    """K = 128, bfloat16: hardly a spill, and decoding issues all loads before it waits for one."""
    assert not [row["name"] for row in rows if row["spill_bytes"] > SPILL_BAR_K128]
    assert [row["loads_after_a_wait"] for row in rows if row["name"] == "decode"] == [0]


SLOW_WHERE_RECORDED = [pytest.mark.slow] if availability.triton_version() == availability.OLDEST_TRITON else []
"""marks of what test_kernel_report.py checks in a record made with this version: `make test-triton` has another one"""


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=SLOW_WHERE_RECORDED)])
def test_every_kernel_compiles_as_launched_and_hardly_spills(target):
    rows = compiled(target, 128)
    assert_rows_are_sound(rows)
    assert_widths_of_the_paper_are_fast(rows)


def test_products_of_float32_operands_do_not_take_registers_on_hopper():
    """K = 128 makes products that are longest in each direction."""
    assert_rows_are_sound(compiled("sm_90", 128, 16, "float16"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 256), (256, 512)])
def test_every_kernel_of_float16_and_float32_is_sound_on_hopper(dtype, key_dim, value_dim):
    assert_rows_are_sound(compiled("sm_90", key_dim, value_dim, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("given_p", [False, True])
def test_every_kernel_fits_a_block_of_older_gpus_at_the_largest_widths(target, dtype, given_p):
    assert_rows_are_sound(compiled(target, 256, 512, dtype, given_p))


def test_the_forward_scan_takes_fewer_instructions_without_outputs():
    """As inside context parallelism, where a summary needs the states only."""
    code = (
        "import json\n"
        "from dataclasses import replace\n"
        "from mdn.bench.gpu.compiling import compile_launch\n"
        "from mdn.bench.kernels import Variant, record_launches\n"
        "launches = record_launches(Variant(key_dim=64, value_dim=64), 'sm_90')['forward']\n"
        "scan = next(launch for launch in launches if launch.name == 'forward_states')\n"
        "states = replace(scan, arguments=scan.arguments | {'o': None, 'residual': None})\n"
        "print(json.dumps([compile_launch(launch, 'sm_90').instructions for launch in (scan, states)]))\n"
    )
    whole, states = compiling_process(code)
    assert states < 0.8 * whole


@pytest.mark.slow
@pytest.mark.parametrize("key_dim", [128, 256])
def test_no_kernel_spills_on_cdna3(key_dim):
    rows = compiled("gfx942", key_dim)
    assert len(rows) == 3 + 6 + 1
    assert [row["name"] for row in rows if row["spill_bytes"]] == []


@pytest.mark.slow
def test_every_kernel_fits_a_hopper_block_at_the_largest_key_width():
    assert_rows_are_sound(compiled("sm_90", 256))


def test_a_kernel_is_built_once_for_all_lengths():
    code = (
        "import json\n"
        "from mdn.bench.kernels import Variant, record_launches\n"
        "from mdn.bench.gpu.compiling import TARGETS, compile_launch\n"
        "for time in (1, 64, 65, 1000):\n"
        "    launches = record_launches(Variant(key_dim=16, value_dim=16, time=time), 'sm_80')['backward']\n"
        "    rebuild = next(launch for launch in launches if launch.name == 'rebuild_states')\n"
        "    compile_launch(rebuild, 'sm_80')\n"
        "built, *_ = rebuild.kernel.device_caches[str(TARGETS['sm_80'])]\n"
        "print(json.dumps(len(built)))\n"
    )
    assert compiling_process(code) == 1

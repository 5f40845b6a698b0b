"""`mdn bench kernels`: registers, spills, shared memory, launches and bytes of the Triton kernels, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mdn.cli.options import positive_int

HELP = "resources of the Triton kernels per GPU target, launches and bytes written; needs no GPU"
EXAMPLE = "mdn bench kernels --targets sm_90 --json kernels.json"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CHOICES = (*TARGETS, "sm_86", "sm_120")
KEY_DIMS = (128, 256)
VALUE_DIM = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", choices=CHOICES, default=list(TARGETS), help="GPUs")
    parser.add_argument("--key-dims", nargs="+", type=int, default=list(KEY_DIMS), metavar="K", help="128 256")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=CHOICES,
        default=[],
        metavar="TARGET",
        help="GPUs for which other dtypes, chunk sizes, head groups and packs are compiled, too",
    )
    parser.add_argument("--quick", action="store_true", help="leave out estimated times and emulated counts (minutes)")
    parser.add_argument(
        "--estimates",
        nargs="+",
        choices=("sm_90", "sm_80"),
        default=["sm_90", "sm_80"],
        help="GPUs for which times are estimated",
    )
    parser.add_argument(
        "--lines", type=positive_int, metavar="N", help="also the N source lines of each kernel that execute most"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from mdn.bench.kernel_bars import broken_bars
    from mdn.bench.kernels import VARIANTS, Variant, count_launches_and_bytes
    from mdn.ops.triton.availability import MAX_KEY_DIM, triton_version

    version = triton_version()
    if version is None:
        raise ValueError("Triton is not installed (pip install 'momentum-deltanet[triton]')")
    wrong = [key_dim for key_dim in args.key_dims if not 1 <= key_dim <= MAX_KEY_DIM]
    if wrong:
        raise ValueError(f"--key-dims must be between 1 and {MAX_KEY_DIM}, got {wrong[0]}")
    from mdn.bench.gpu.compiling import compile_variant  # imports Triton

    defaults = [Variant(key_dim=key_dim, value_dim=VALUE_DIM) for key_dim in args.key_dims]
    wanted = [(variant, target) for variant in defaults for target in args.targets]
    wanted += [(variant, target) for variant in VARIANTS for target in args.variants]
    rows: dict[str, list[dict[str, Any]]] = {"kernels": [], "variants": []}
    counted = {}
    with tqdm(total=len(args.key_dims) + len(wanted), desc="counting", disable=not sys.stderr.isatty()) as bar:
        for key_dim in args.key_dims:
            counted[key_dim] = count_launches_and_bytes(key_dim, VALUE_DIM)
            bar.update()
        bar.set_description("compiling")
        for variant, target in wanted:
            for row in compile_variant(variant, target):
                if variant in defaults:
                    rows["kernels"].append(row)
                else:
                    rows["variants"].append({"variant": variant.name, **row})
            bar.update()
    report = {
        "triton": ".".join(map(str, version)),
        "launches": counted[args.key_dims[0]]["launches"],
        "bytes_written_per_token_head": {f"K{key_dim}": found["bytes"] for key_dim, found in counted.items()},
        "bytes_written_by_kernel": {f"K{key_dim}": found["by_kernel"] for key_dim, found in counted.items()},
        **{name: found for name, found in rows.items() if found},
    }
    if not args.quick:
        report |= {"estimates": list(_estimates(args.estimates)), "counts": list(_counts())}
    _show(report, broken_bars(report))
    if args.lines:
        from mdn.bench.gpu.counts import dearest_lines

        print(f"\nsource lines that execute most, sm_80\n{_table(list(dearest_lines('sm_80', args.lines)))}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def _estimates(targets: list[str]) -> Iterator[dict[str, Any]]:
    from mdn.bench.gpu.estimate import estimate_times

    yield from estimate_times(targets)


def _counts() -> Iterator[dict[str, Any]]:
    from mdn.bench.gpu.counts import count_executed

    for op, target in (("mdn", "sm_80"), ("mdn", "sm_90"), ("gdn", "sm_80"), ("kda", "sm_80")):
        yield from count_executed(op, target)


def _show(report: dict[str, Any], broken: list[str]) -> None:
    from mdn.bench.kernel_bars import total_ms
    from mdn.bench.kernel_tables import list_buffers

    launches = report["launches"]
    print(f"launches: forward {launches['forward']}, backward {launches['backward']}, decode {launches['decode']}")
    for key, passes in report["bytes_written_by_kernel"].items():
        totals = report["bytes_written_per_token_head"][key]
        for which, kernels in passes.items():
            print(f"\nbytes written per token and head, {key}, {which}: {totals[which]:,.0f}")
            for kernel, buffers in kernels.items():
                print(f"  {kernel:<17}{list_buffers(buffers)}")
    names = f"{'kernel':<17}{'pass':<10}{'target':<8}{'K':>5}{'V':>5}"
    print(f"\n{names}{'registers':>11}{'spills':>8}{'shared':>9}{'instructions':>14}")
    for row in (*report["kernels"], *report.get("variants", ())):
        cells = f"{row['registers']:>11}{row['spill_bytes']:>8}{row['shared_bytes']:>9,}{row['instructions']:>14,}"
        name = f"{row['name']:<17}{row['pass']:<10}{row['target']:<8}{row['K']:>5}{row['V']:>5}"
        print(name + cells + f"  {row.get('variant', '')}".rstrip())
    for title, rows in (
        ("estimated time of forward + backward (an estimate, no measurement)", "estimates"),
        ("executed per token and head, K = V = 128", "counts"),
    ):
        if rows in report:
            print(f"\n{title}\n{_table(report[rows])}")
    for (target, size), times in total_ms(report).items():
        print(f"{target} {size}: " + ", ".join(f"{op} {ms:.2f} ms" for op, ms in times.items()))
    print("\n" + ("every bar is met" if not broken else "bars not met:\n  " + "\n  ".join(broken)))


def _table(rows: list[dict[str, Any]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [list(rows[0])] + [[f"{x:,.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)

"""`mdn bench kernels`: what the Triton kernels need, execute and would take by estimate, without a GPU."""

from __future__ import annotations

import argparse
from typing import Any

from mdn.cli.options import output_file, positive_int

HELP = "the Triton kernels without a GPU: resources, traffic, executed instructions, estimated times beside FLA's"
EXAMPLE = "mdn bench kernels --quick --targets sm_90 --key-dims 128"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CHOICES = (*TARGETS, "sm_86", "sm_120")
KEY_DIMS = (128, 256)


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
    parser.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def run(args: argparse.Namespace) -> None:
    from mdn.bench.kernel_bars import broken_bars
    from mdn.bench.kernel_report import ReportOptions, make_report
    from mdn.common.results import write_results
    from mdn.ops.triton.availability import MAX_KEY_DIM, triton_version

    if triton_version() is None:
        raise ValueError("Triton is not installed (pip install 'momentum-deltanet[triton]')")
    wrong = [key_dim for key_dim in args.key_dims if not 1 <= key_dim <= MAX_KEY_DIM]
    if wrong:
        raise ValueError(f"--key-dims must be between 1 and {MAX_KEY_DIM}, got {wrong[0]}")
    estimates = () if args.quick else args.estimates
    report = make_report(ReportOptions(args.targets, args.key_dims, args.variants, estimates, args.lines or 0))
    _show(report, broken_bars(report))
    if args.json:
        write_results(args.json, "kernels", report)


def _show(report: dict[str, Any], broken: list[str]) -> None:
    from mdn.bench.kernel_report import total_ms
    from mdn.bench.kernel_tables import list_buffers

    launches = report["launches"]
    print(f"launches: forward {launches['forward']}, backward {launches['backward']}, decode {launches['decode']}")
    for key, passes in report["bytes_written_by_kernel"].items():
        totals = report["bytes_written_per_token_head"][key]
        for which, kernels in passes.items():
            print(f"\nbytes written per token and head, {key}, {which}: {totals[which]:,.0f}")
            for kernel, buffers in kernels.items():
                print(f"  {kernel:<17}{list_buffers(buffers)}")
    for title, rows in (
        ("compiled, with static cycles of a program (of a scan: of one chunk)", "kernels"),
        ("compiled for other inputs, K=128, V=256, chunk 64, bfloat16 unless named", "variants"),
        ("estimated time of forward + backward (an estimate, no measurement)", "estimates"),
        ("published times of FLA's forward passes on an H20 beside the estimate", "calibration"),
        ("executed per token and head, K = V = 128", "executed"),
        ("executed per token and head, K=256, V=512", "executed_large"),
        ("source lines that execute most, per token and head, K = V = 128", "lines"),
    ):
        if rows in report:
            print(f"\n{title}\n{_table(report[rows])}")
    for (target, size), times in total_ms(report.get("estimates", [])).items():
        print(f"{target} {size}, estimated: " + ", ".join(f"{op} {ms:.2f} ms" for op, ms in times.items()))
    print("\n" + ("every bar is met" if not broken else "bars not met:\n  " + "\n  ".join(broken)))


def _table(rows: list[dict[str, Any]]) -> str:
    """Columns as wide as their widest cell; a row need not have every column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    lines = [names, *cells]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)

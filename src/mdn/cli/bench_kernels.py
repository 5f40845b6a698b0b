"""`mdn bench kernels`: registers, spills, shared memory, launches and bytes of the Triton kernels, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HELP = "resources of the Triton kernels per GPU target, launches and bytes written; needs no GPU"
EXAMPLE = "mdn bench kernels --targets sm_90 --json kernels.json"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
KEY_DIMS = (128, 256)
VALUE_DIM = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", choices=(*TARGETS, "sm_120"), default=list(TARGETS), help="GPUs")
    parser.add_argument("--key-dims", nargs="+", type=int, default=list(KEY_DIMS), metavar="K", help="128 256")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from mdn.bench.kernels import broken_bars, compile_all, count_launches_and_bytes
    from mdn.ops.triton.availability import MAX_KEY_DIM, triton_version

    if triton_version() is None:
        raise ValueError("Triton is not installed (pip install 'momentum-deltanet[triton]')")
    wrong = [key_dim for key_dim in args.key_dims if not 1 <= key_dim <= MAX_KEY_DIM]
    if wrong:
        raise ValueError(f"--key-dims must be between 1 and {MAX_KEY_DIM}, got {wrong[0]}")
    counted = {key_dim: count_launches_and_bytes(key_dim, VALUE_DIM) for key_dim in args.key_dims}
    total = 8 * len(args.targets) * len(args.key_dims)
    rows = compile_all(args.targets, args.key_dims, VALUE_DIM)
    report = {
        "launches": counted[args.key_dims[0]]["launches"],
        "bytes_written_per_token_head": {f"K{key_dim}": found["bytes"] for key_dim, found in counted.items()},
        "kernels": list(tqdm(rows, total=total, desc="compiling", disable=not sys.stderr.isatty())),
    }
    _show(report, broken_bars(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def _show(report: dict, broken: list[str]) -> None:
    for key, numbers in {"launches": report["launches"], **report["bytes_written_per_token_head"]}.items():
        what = "launches" if key == "launches" else f"bytes written per token and head, {key}"
        print(f"{what}: forward {numbers['forward']:,.0f}, backward {numbers['backward']:,.0f}")
    print(f"\n{'kernel':<18}{'target':<9}{'K':>5}{'registers':>11}{'spills':>8}{'shared':>9}{'instructions':>14}")
    for row in report["kernels"]:
        cells = f"{row['registers']:>11}{row['spill_bytes']:>8}{row['shared_bytes']:>9,}{row['instructions']:>14,}"
        print(f"{row['name']:<18}{row['target']:<9}{row['K']:>5}{cells}")
    print("\n" + ("every bar is met" if not broken else "bars not met:\n  " + "\n  ".join(broken)))

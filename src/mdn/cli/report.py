"""`mdn report RUNS... --out page.html`: one self-contained page from run folders."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mdn.cli.options import output_file

HELP = "one self-contained page (no network) with everything found in run folders, and a spectral explorer"
EXAMPLE = "mdn report runs/demo runs/ablate --out page.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders or result files")
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE", help="the HTML file to write")
    parser.add_argument("--title", default="Momentum DeltaNet: runs", help="heading of the page")


def run(args: argparse.Namespace) -> None:
    from mdn.analysis.report.collect import collect
    from mdn.analysis.report.page import build_page
    from mdn.common.files import write_atomically
    from mdn.common.results import command_line

    if args.out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out must be an .html file, got {args.out}")
    found = collect(args.runs)
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    page = build_page(found, args.title, command_line(), date)
    write_atomically(args.out, page.encode())
    print(
        f"{args.out}: training runs {len(found.runs)}, result files {len(found.results)}, "
        f"figures {len(found.figures)}, files not used {len(found.unused)}; {len(page) / 1e6:.1f} MB"
    )

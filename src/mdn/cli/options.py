"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the figure to FILE, as PNG and SVG")

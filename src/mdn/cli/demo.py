"""`mdn demo`: a small Momentum DeltaNet on the Python standard library, trained, measured and shown."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli import train

HELP = "train a small model on the Python standard library (a few minutes on two cores), measure it and let it write"
EXAMPLE = "mdn demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the demo recipe")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")


def run(args: argparse.Namespace) -> int:
    namespace = argparse.Namespace(recipe="demo", overrides=args.overrides, dry_run=False, json=args.json)
    return train.run(namespace)

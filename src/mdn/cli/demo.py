"""`mdn demo`: a small Momentum DeltaNet on the Python standard library, trained, measured and shown."""

from __future__ import annotations

import argparse

from mdn.cli import train
from mdn.cli.options import add_output_arguments

HELP = "train a small model on the Python standard library (a few minutes on two cores), measure it and let it write"
EXAMPLE = "mdn demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the demo recipe")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> int:
    namespace = argparse.Namespace(recipe="demo", overrides=args.overrides, dry_run=False, json=args.json)
    return train.run(namespace)

"""`mdn demo`: a small Momentum DeltaNet on the Python standard library, trained, measured and shown."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments
from mdn.cli.train import train_and_show

HELP = "train a small model on the Python standard library (a few minutes on two cores), measure it and let it write"
EXAMPLE = "mdn demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the demo recipe")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> int:
    from mdn.training.recipe import load_recipe

    return train_and_show(load_recipe("demo", args.overrides), args.json)

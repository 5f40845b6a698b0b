"""`mdn bench quality`: held-out bits per byte of trained models in float32 and with packed weights."""

from __future__ import annotations

import argparse

from mdn.cli.options import WEIGHT_FORMATS, add_output_arguments, names

HELP = "held-out bits per byte of trained models in float32 and with packed weights"
EXAMPLE = "mdn bench quality runs/demo --weights int8,int4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or checkpoints inside them")
    parser.add_argument("--weights", type=names, default="bf16,int8,int4", help="formats, with commas (all)")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    unknown = [name for name in args.weights if name not in WEIGHT_FORMATS]
    if unknown:
        raise ValueError(f"--weights has unknown formats {unknown}; expected some of {list(WEIGHT_FORMATS)}")
    from mdn.bench.weight_quality import measure, table, trained_model
    from mdn.common.results import write_results

    for source in args.runs:  # a wrong path is refused before the first model is measured
        trained_model(source)
    models = [measure(source, args.weights) for source in args.runs]
    print(table(models))
    write_results(args.json, "weight_quality", {"models": models})

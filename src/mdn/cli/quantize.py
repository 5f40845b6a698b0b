"""`mdn quantize`: a copy of a model with its weights packed in 16, 8 or 4 bits, for decoding on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import WEIGHT_FORMATS, add_output_arguments, output_directory
from mdn.common.results import write_results

HELP = "write a copy of a model with packed weights; every command and from_pretrained load it like any other"
EXAMPLE = "mdn quantize runs/demo models/demo-int8 --weights int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run folder, a model directory or a Hub id")
    parser.add_argument("target", type=output_directory, help="a new directory for the packed model")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="int8", help="the format (int8)")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    from mdn.common.files import share
    from mdn.common.loading import load_model, load_tokenizer, resolve_model
    from mdn.models.convert import refuse_used, save_with_tokenizer

    refuse_used(args.target)
    source = Path(resolve_model(args.model))
    model = load_model(args.model)
    before = model.get_memory_footprint()
    model.quantize(args.weights)
    after = model.get_memory_footprint()
    save_with_tokenizer(model, source, args.target)
    if not source.is_dir():  # a Hub id
        load_tokenizer(args.model).save_pretrained(args.target)
    share(args.target)
    print(f"{args.weights} weights, {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB, written to {args.target}")
    facts = {"model": args.model, "weights": args.weights, "bytes_before": before, "bytes_after": after}
    write_results(args.json, "quantize", facts)

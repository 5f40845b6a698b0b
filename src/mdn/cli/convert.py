"""`mdn convert`: an FLA or Hugging Face checkpoint becomes a model of this project."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import add_output_arguments, output_directory
from mdn.common.results import write_results

HELP = "convert a checkpoint of FLA or transformers: GDN, Comba, KDA, Mamba2, GLA, DeltaNet, RWKV-7, LLaMA and others"
EXAMPLE = "mdn convert downloads/gated-deltanet-340M models/gdn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a directory with config.json and *.safetensors, or a run folder")
    parser.add_argument("target", type=output_directory, help="a new directory for the converted model")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    from mdn.common.files import share
    from mdn.common.loading import import_plugins_of_environment, resolve_model
    from mdn.models.convert import read_checkpoint, write_model

    import_plugins_of_environment()
    source = Path(resolve_model(args.source)) if args.source.is_dir() else args.source
    conversion = read_checkpoint(source, progress=True)
    write_model(conversion, source, args.target)
    share(args.target)
    patterns = conversion.patterns()
    width = max(len(theirs) for theirs, _, _ in patterns)
    for theirs, ours, count in patterns:
        print(f"  {theirs:<{width}} -> {ours}  ({count})")
    parameters = sum(value.numel() for name, value in conversion.weights.items() if name in conversion.matched)
    print(
        f"{conversion.model_type} -> {conversion.config.mixer}: all {len(conversion.matched)} tensors matched, "
        f"{parameters:,} parameters, written to {args.target}"
    )
    facts = {"model_type": conversion.model_type, "mixer": conversion.config.mixer, "parameters": parameters}
    write_results(args.json, "convert", facts | {"matched": conversion.matched})

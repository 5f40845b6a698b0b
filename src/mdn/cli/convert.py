"""`mdn convert`: an FLA or Hugging Face checkpoint becomes a model of this project."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "convert a checkpoint of FLA or transformers: GDN, Comba, KDA, Mamba2, GLA, DeltaNet, RWKV-7, LLaMA and others"
EXAMPLE = "mdn convert downloads/gated-deltanet-340M models/gdn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a directory with config.json and *.safetensors")
    parser.add_argument("target", type=Path, help="a new directory for the converted model")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the matched names to this file")


def run(args: argparse.Namespace) -> None:
    from mdn.models.conversion import read_checkpoint, write_model

    conversion = read_checkpoint(args.source, progress=True)
    write_model(conversion, args.source, args.target)
    patterns = conversion.patterns()
    width = max(len(theirs) for theirs, _, _ in patterns)
    for theirs, ours, count in patterns:
        print(f"  {theirs:<{width}} -> {ours}  ({count})")
    parameters = sum(value.numel() for name, value in conversion.weights.items() if name in conversion.matched)
    print(
        f"{conversion.model_type} -> {conversion.config.mixer}: all {len(conversion.matched)} tensors matched, "
        f"{parameters:,} parameters, written to {args.target}"
    )
    if args.json is not None:
        facts = {"model_type": conversion.model_type, "mixer": conversion.config.mixer, "parameters": parameters}
        args.json.write_text(json.dumps(facts | {"matched": conversion.matched}, indent=2) + "\n")

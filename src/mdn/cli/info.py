"""`mdn info`: what a model costs, from its configuration alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import add_output_arguments, positive_int
from mdn.common.results import write_results

HELP = "parameters by part, state bytes per sequence and FLOPs per token of a model or config"
EXAMPLE = "mdn info mdn_400M --context 4096"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="a shipped config (mdn_400M), a JSON file, a model directory, a run folder, a Hub id"
    )
    parser.add_argument("--all", action="store_true", help="a page with all shipped configs (docs/models.md)")
    parser.add_argument(
        "--context", type=positive_int, default=4096, help="tokens seen so far, for attention layers (4096)"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="dtype of weights (bfloat16)")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    if args.all == (args.model is not None):
        raise ValueError("give either a model or --all")
    if args.all:
        _all(args.json)
        return
    from mdn.models.info import load_config, model_facts

    config = load_config(args.model)
    facts = model_facts(config, args.context, DTYPE_BYTES[args.dtype])
    kinds = [config.mixer_name(layer) for layer in range(config.num_hidden_layers)]
    layers = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    print(f"{args.model}: {config.num_hidden_layers} layers ({layers}), hidden size {config.hidden_size}")
    print("\nparameters")
    for part, number in facts.parameters.items():
        print(f"  {part:<16}{number:>16,}  {number / facts.total_parameters:6.1%}")
    print(f"  {'total':<16}{facts.total_parameters:>16,}")
    print(f"\nstate of one sequence after {args.context:,} tokens ({args.dtype})")
    for kind, size in facts.state_bytes.items():
        print(f"  {kind:<16}{size:>16,} bytes")
    print(f"  {'total':<16}{sum(facts.state_bytes.values()):>16,} bytes")
    print(f"  grows by {facts.state_bytes_per_token:,} bytes per token")
    print(f"\nFLOPs per token at a context of {args.context:,}")
    print(f"  {'forward':<16}{facts.forward_flops_per_token:>16,}")
    print(f"  {'training':<16}{facts.training_flops_per_token:>16,}")
    write_results(args.json, "info", {"model": args.model, "dtype": args.dtype, **facts.as_dict()})


def _all(file: Path | None) -> None:
    from mdn.models.info import all_facts, page

    facts = all_facts(progress=True)
    print(page(facts), end="")
    write_results(file, "info", {name: of_one.as_dict() for name, of_one in facts.items()})

"""`mdn analyze state-norm`: the average change norm of the fast weight during decoding, per layer and head."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mdn.cli.options import add_output_arguments, positive_int, whole_number
from mdn.common.results import markdown_table, write_results

HELP = "average change of the fast weight per decoding step, per layer and head, for any trained mixers on one text"
EXAMPLE = "mdn analyze state-norm mdn=runs/demo/model gdn=runs/gdn/model --text README.md --plot state_norm.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="[NAME=]DIR", help="trained models with their tokenizers")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text that is read")
    parser.add_argument("--tokens", type=whole_number(2), default=512, help="decoding steps per sequence (512)")
    parser.add_argument(
        "--sequences", type=positive_int, default=4, help="pieces of the text, decoded side by side (4)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.analysis.arguments import load_model_and_tokens
    from mdn.analysis.state_norm import change_norms, draw, summarise

    results: dict[str, Any] = {}
    for word in args.models:
        name, _, source = word.rpartition("=")
        model, ids = load_model_and_tokens(source, args.text, args.tokens * args.sequences)
        pieces = min(args.sequences, ids.shape[1] // args.tokens)
        if pieces < 1:
            raise ValueError(f"--text {args.text} has {ids.shape[1]} tokens, but --tokens asks for {args.tokens}")
        rows = ids[0, : pieces * args.tokens].view(pieces, args.tokens)
        name = name or model.config.mixer
        results[name] = {"mixer": model.config.mixer, **summarise(change_norms(model, rows, label=name))}
    _print(results)
    found = {"text": args.text.name, "models": results}
    write_results(args.json, "state-norm", found)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(found), args.plot)


def _print(results: dict[str, Any]) -> None:
    rows = []
    for name, entry in results.items():
        for layer in entry["per layer"]:
            heads = " ".join(f"{value:.3g}" for value in layer["mean change per head"])
            rows.append([name, str(layer["layer"]), heads, f"{layer['relative change']:.3f}"])
    print(markdown_table(["model", "layer", "mean change of S, every head", "change / norm"], rows))
    for name, entry in results.items():
        print(
            f"{name}: mean change {entry['mean change']:.4g} over {entry['steps']} steps, "
            f"n = {entry['n']} ({entry['n is']})"
        )

"""`mdn analyze state-norm`: the average change norm of the fast weight during decoding, per layer and head."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mdn.cli.options import add_output_arguments, positive_int, whole_number

HELP = "average change of the fast weight per decoding step, per layer and head, for any trained mixers on one text"
EXAMPLE = "mdn analyze state-norm mdn=runs/demo gdn=runs/gdn --text README.md --plot state_norm.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="[NAME=]DIR", help="trained models with their tokenizers")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text that is read")
    parser.add_argument("--tokens", type=whole_number(2), default=512, help="decoding steps per sequence (512)")
    parser.add_argument("--sequences", type=positive_int, default=4, help="pieces of the text, side by side (4)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.analysis.recording import load_model_and_tokens
    from mdn.analysis.state_norm import change_norms, draw, summarise, tables
    from mdn.common.results import write_results

    found: dict[str, Any] = {}
    for word in args.models:
        name, _, source = word.rpartition("=")
        model, ids = load_model_and_tokens(source, args.text, args.tokens * args.sequences)
        pieces = min(args.sequences, ids.shape[1] // args.tokens)
        if pieces < 1:
            raise ValueError(f"--text {args.text} has {ids.shape[1]} tokens, but --tokens asks for {args.tokens}")
        rows = ids[0, : pieces * args.tokens].view(pieces, args.tokens)
        name = name or model.config.mixer
        found[name] = {"mixer": model.config.mixer, **summarise(change_norms(model, rows, label=name))}
    content = {"text": args.text.name, "models": found}
    print(*tables(content), sep="\n\n")
    write_results(args.json, "state-norm", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

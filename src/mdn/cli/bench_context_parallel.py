"""`mdn bench context-parallel`: time and bytes of a layer whose tokens several processes share."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, positive_int, whole_number

HELP = "time and bytes of a layer whose tokens several processes share, measured here and by formula up to 64 devices"
EXAMPLE = "mdn bench context-parallel --ranks 2 --tokens 2048 --json context_parallel.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixers", nargs="+", default=["momentum_deltanet", "gated_deltanet"], metavar="NAME")
    parser.add_argument("--ranks", type=whole_number(2, 64), default=2, help="processes on this machine (default 2)")
    parser.add_argument("--tokens", type=whole_number(2), default=2048, help="tokens on each rank (default 2048)")
    parser.add_argument("--hidden-size", type=positive_int, default=256)
    parser.add_argument("--heads", type=positive_int, default=2)
    parser.add_argument("--head-dim", type=positive_int, default=64)
    parser.add_argument("--repeats", type=positive_int, default=5, help="the minimum of so many times is taken")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    from mdn.bench.context_parallel import LINK, LayerSize, by_formula, formula_table, measure, measured_table
    from mdn.bench.timing import machine
    from mdn.bench.training_step import check_mixers
    from mdn.common.results import write_results

    facts = machine()
    sizes = [
        LayerSize(mixer, args.hidden_size, args.heads, args.head_dim, args.tokens, args.repeats)
        for mixer in check_mixers(args.mixers)
    ]
    rows = [measure(size, args.ranks) for size in sizes]
    formula = by_formula()
    print(f"measured: {args.ranks} processes of one thread, gloo; one layer, one document\n")
    print(measured_table(rows))
    print(
        f"\nby formula: bytes that a rank receives in one layer's forward pass, and their time at {LINK / 1e9:.0f} GB/s"
    )
    print("\n" + formula_table(formula))
    write_results(args.json, "context-parallel", {"machine": facts, "rows": rows, "formula": formula})

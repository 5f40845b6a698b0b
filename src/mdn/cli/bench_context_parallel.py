"""`mdn bench context-parallel`: time and bytes of a layer whose tokens several processes share."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, positive_int, whole_number

HELP = "time and bytes of a layer whose tokens several processes share, measured here and by formula up to 64 devices"
EXAMPLE = "mdn bench context-parallel --ranks 2 --json context_parallel.json --plot context_parallel.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixers", nargs="+", default=["momentum_deltanet", "gated_deltanet"], metavar="NAME")
    parser.add_argument("--ranks", type=whole_number(2, 64), default=2, help="processes on this machine (default 2)")
    parser.add_argument("--tokens", type=whole_number(2), default=4096, help="tokens on each rank (default 4096)")
    parser.add_argument("--hidden-size", type=positive_int, default=512)
    parser.add_argument("--heads", type=positive_int, default=4)
    parser.add_argument("--head-dim", type=positive_int, default=64)
    parser.add_argument("--repeats", type=positive_int, default=5, help="the minimum of so many times is taken")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.bench.context_parallel import BenchSize, measure_exchange, measure_work
    from mdn.bench.context_parallel_results import attention_by_formula, by_formula, draw, shares_by_formula, tables
    from mdn.bench.timing import machine
    from mdn.bench.training_step import check_mixers
    from mdn.common.results import write_results

    mixers = tuple(check_mixers(args.mixers))
    size = BenchSize(mixers, args.hidden_size, args.heads, args.head_dim, args.tokens, args.repeats)
    content = {
        "machine": machine(),
        "size": vars(size),
        **measure_work(size),
        "exchange": measure_exchange(size, args.ranks),
        "shares": shares_by_formula(),
        "formula": by_formula(),
        "attention": attention_by_formula(),
    }
    print(*tables(content), sep="\n\n")
    write_results(args.json, "context-parallel", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

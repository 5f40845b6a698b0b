"""`mdn bench decode`: latency per token and memory per sequence against context length, for every mixer."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, names, number, positive_int, whole_numbers
from mdn.common.results import markdown_table, write_results

HELP = "decoding latency and memory against context length, every mixer at equal size, as ratios in one run"
EXAMPLE = "mdn bench decode --mixers momentum_deltanet,gated_deltanet,attention --plot decode.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixers", type=names, default=["all"], help="names separated by commas (all)")
    parser.add_argument(
        "--contexts", type=whole_numbers, default=(128, 512, 2048, 8192, 32768), help="context lengths (128 to 32768)"
    )
    parser.add_argument("--batches", type=whole_numbers, default=(1, 16), help="batch sizes (1,16)")
    parser.add_argument("--hidden-size", type=positive_int, default=256, help="of every model (256)")
    parser.add_argument("--layers", type=positive_int, default=2, help="of every model (2)")
    parser.add_argument("--heads", type=positive_int, default=4, help="of every model (4)")
    parser.add_argument("--repeats", type=positive_int, default=20, help="rounds over all mixers per point (20)")
    parser.add_argument("--seconds", type=number(0), default=10.0, help="stop a point's rounds after this long (10)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.bench.decode import Size, bench, draw
    from mdn.layers import MIXERS

    mixers = list(MIXERS) if args.mixers == ["all"] else args.mixers
    unknown = [name for name in mixers if name not in MIXERS]
    if unknown:
        raise ValueError(f"--mixers has unknown names {unknown}; expected some of {sorted(MIXERS)}")
    contexts, batches = sorted(args.contexts), sorted(args.batches)
    size = Size(args.hidden_size, args.layers, args.heads)
    results = bench(mixers, contexts, batches, size, args.repeats, args.seconds)
    _print(results, contexts, batches)
    write_results(args.json, "decode", results)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(results), args.plot)


def _print(results: dict, contexts: list[int], batches: list[int]) -> None:
    from mdn.bench.decode import growth

    rows = results["rows"]
    for batch in batches:
        table = []
        for mixer in results["parameters"]:
            mine = {row["context"]: row for row in rows if row["mixer"] == mixer and row["batch"] == batch}
            cells = [f"{1e3 * mine[c]['seconds']:.2f} ({mine[c]['ratio to MDN']:.2f})" for c in contexts]
            memory = f"{mine[contexts[-1]]['bytes per sequence'] / 2**20:.2f}"
            table.append([mixer, *cells, f"{growth(rows, mixer, batch):.2f}", memory])
        header = ["mixer", *(f"{c}" for c in contexts), "longest / shortest", f"MiB per sequence at {contexts[-1]}"]
        print(f"batch {batch}: milliseconds per decoding step (ratio to MDN) by context\n")
        print(markdown_table(header, table) + "\n")
    facts = results["machine"]
    print(f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}, load {facts['load_before']:.1f}")

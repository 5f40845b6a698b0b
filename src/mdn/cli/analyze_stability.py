"""`mdn analyze stability`: spectral radius per step, growth of products of steps, where the guarantee ends."""

from __future__ import annotations

import argparse
from typing import Any

from mdn.cli.options import add_model_arguments, add_output_arguments, positive_int, records_of, seed, whole_numbers

HELP = "spectral radius per step, norms of products over windows, and where the stability guarantee ends"
EXAMPLE = "mdn analyze stability --plot stability.png   (or --alpha 0.9,1 --mu 0.9,1, or --model DIR --text FILE)"
MOST_GATES = 20_000_000
RANGES = {"alpha": (0.0, 1.0), "beta": (0.0, 1.0), "mu": (0.0, 1.0), "eta": (0.0, 2.0), "direct": (0.0, 0.0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (low, high) in RANGES.items():
        parser.add_argument(f"--{name}", metavar="LOW,HIGH", help=f"draw {name} from this range ({low:g},{high:g})")
    parser.add_argument("--variants", default="all", help="names of gate variants, separated by commas (all)")
    parser.add_argument("--heads", type=positive_int, default=126, help="heads drawn per variant (126)")
    parser.add_argument("--steps", type=positive_int, default=4096, help="steps per head (4096)")
    parser.add_argument(
        "--windows", type=whole_numbers, default="1,4,16,64,256,1024", help="window lengths (1,4,16,64,256,1024)"
    )
    parser.add_argument("--seed", type=seed, default=0)
    add_model_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from mdn.analysis.stability import analyse, draw, guarantee, guarantee_end, tables
    from mdn.common.progress import progress
    from mdn.common.results import write_results

    if args.heads * args.steps > MOST_GATES:
        raise ValueError(f"--heads x --steps must be at most {MOST_GATES:,}, got {args.heads:,} x {args.steps:,}")
    windows = sorted(args.windows)
    if args.model is None and windows[0] > args.steps:
        raise ValueError(f"--windows must have one of at most {args.steps} steps, the shortest is {windows[0]}")
    sources = {
        name: analyse(make(), windows)
        for name, make in progress(list(_sources(args).items()), desc="stability", unit="source", leave=False)
    }
    rows = guarantee(np.linspace(-4, 0, 401))
    end = guarantee_end(rows)
    content: dict[str, Any] = {"seed": args.seed, "sources": sources, "guarantee": rows, "end": end}
    print(*tables(content), sep="\n\n")
    print(
        f"\nright half plane guaranteed down to log mu = {end['found by sweep']:.2f} by a sweep of all allowed gates, "
        f"{end['closed form']:.3f} = -ln 8 by the closed form; below it only the guarantee ends, the rule is computed"
    )
    write_results(args.json, "stability", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)


def _sources(args: argparse.Namespace) -> dict[str, Any]:
    """Name and maker of every set of gates to look at."""
    from mdn.analysis.stability import VARIANTS, initial_record, range_record

    records = records_of(args)
    if records is not None:
        return {f"layer {record.layer}": (lambda record=record: record) for record in records}
    given = {name: _range(name, getattr(args, name)) for name in RANGES if getattr(args, name) is not None}
    if given:
        ranges = {**RANGES, **given}
        label = ", ".join(f"{name} {low:g}..{high:g}" for name, (low, high) in ranges.items())
        return {label: lambda: range_record(ranges, args.heads, args.steps, args.seed)}
    names = list(VARIANTS) if args.variants == "all" else [word.strip() for word in args.variants.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"--variants has unknown names {unknown}; expected some of {list(VARIANTS)}")
    return {name: (lambda name=name: initial_record(name, args.heads, args.steps, args.seed)) for name in names}


def _range(name: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} must be two numbers LOW,HIGH, got {text!r}") from None
    most = 2.0 if name in ("eta", "direct") else 1.0
    if not 0 <= low <= high or (name != "beta" and high > most):
        raise ValueError(f"--{name} must satisfy 0 <= LOW <= HIGH <= {most:g}, got {text}")
    return low, high

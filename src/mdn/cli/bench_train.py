"""`mdn bench train`: speed and memory of a whole training step for every mixer, as ratios to attention."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, number, positive_int, whole_number

HELP = "tokens per second and peak memory of a training step for every mixer, at equal size, as ratios to attention"
EXAMPLE = "mdn bench train --lengths 512 2048 8192 --json train.json --plot train.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixers", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--lengths", nargs="+", type=whole_number(2), default=[512, 1024, 2048, 4096, 8192], metavar="T"
    )
    parser.add_argument("--tokens", type=positive_int, default=8192, help="tokens per step, the same at every length")
    parser.add_argument("--hidden-size", type=positive_int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=positive_int, default=2)
    parser.add_argument("--repeats", type=positive_int, default=3, help="the minimum of so many times is taken")
    parser.add_argument(
        "--budget", type=number(0), default=120.0, help="seconds per length after which repeating stops"
    )
    parser.add_argument(
        "--profile", nargs="+", default=[], metavar="RECIPE", help="also: where the time of a recipe's step goes"
    )
    parser.add_argument(
        "--profile-tokens", type=positive_int, default=2048, help="most tokens of a step of --profile (2048)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if args.hidden_size % 64:
        raise ValueError(f"--hidden-size must be a multiple of 64, got {args.hidden_size}")
    import torch

    from mdn.bench.timing import machine
    from mdn.bench.training_step import (
        StepSize,
        check_mixers,
        compare_with_torch,
        draw,
        measure,
        profile_recipe,
        tables,
    )
    from mdn.common.results import write_results
    from mdn.layers import MIXERS
    from mdn.training.recipe import load_recipe

    for name in args.profile:
        load_recipe(name, [])  # a wrong name is refused before anything is measured
    facts = machine()
    mixers = check_mixers(args.mixers or list(MIXERS))
    size = StepSize(hidden_size=args.hidden_size, layers=args.layers, tokens=args.tokens, lengths=tuple(args.lengths))
    rows = measure(mixers, size, args.repeats, args.budget)
    compared = None
    if not torch.cuda.is_available() and "momentum_deltanet" in mixers:
        compared = compare_with_torch(size, args.repeats, args.budget)
    profiles = [profile_recipe(name, args.profile_tokens) for name in args.profile]
    content = {"machine": facts, "size": vars(size), "rows": rows, "compared": compared, "profiles": profiles}
    print(*tables(content), sep="\n\n")
    write_results(args.json, "train", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

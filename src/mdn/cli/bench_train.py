"""`mdn bench train`: speed and memory of a whole training step for every mixer, as ratios to attention."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "tokens per second and peak memory of a training step for every mixer, at equal size, as ratios to attention"
EXAMPLE = "mdn bench train --lengths 512 2048 8192 --json train.json --plot train.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixers", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192], metavar="T")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step, the same at every length")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="the least time of so many is taken")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds per length after which repeating stops")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG and SVG")


def run(args: argparse.Namespace) -> int:
    if args.hidden_size % 64 or args.hidden_size < 64:
        raise ValueError(f"--hidden-size must be a multiple of 64, got {args.hidden_size}")
    if min(args.lengths) < 2:
        raise ValueError(f"--lengths must be at least 2, got {min(args.lengths)}")
    from mdn.bench import train
    from mdn.bench.timing import machine
    from mdn.common.results import command_line
    from mdn.layers import MIXERS

    facts = machine()
    mixers = train.check_mixers(args.mixers or list(MIXERS))
    setting = train.Setting(
        hidden_size=args.hidden_size, layers=args.layers, tokens=args.tokens, lengths=tuple(args.lengths)
    )
    rows = train.measure(mixers, setting, args.repeats, args.budget)
    print(train.table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"command": command_line(), **train.as_json(rows, setting, facts)}, indent=1))
    if args.plot:
        train.plot(rows, args.plot, command_line())
    return 0

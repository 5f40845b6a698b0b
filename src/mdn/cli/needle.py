"""`mdn needle`: needle in a haystack over length and depth, for tiny models trained here or for a trained one."""

from __future__ import annotations

import argparse
from typing import Any

from mdn.cli.options import add_output_arguments, names, number, output_directory, positive_int, seed, whole_numbers

HELP = "needle in a haystack over length and depth: trains tiny models on the spot, or takes a trained one"
TRAINING_DEFAULTS = {"mixers": ["momentum_deltanet"], "steps": 500, "learning_rate": 5e-3}
"""options of the tiny models that are trained here, and what they are if not given; --model refuses them"""
EXAMPLE = "mdn needle --mixers momentum_deltanet,gated_deltanet --steps 500 --out runs/needle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a trained language model (directory, run folder or Hub id) instead of tiny ones"
    )
    parser.add_argument("--mixers", type=names, help="tiny models to train, with commas (momentum_deltanet)")
    parser.add_argument("--haystack", choices=["noise", "documentation"], default="noise", help="the text (noise)")
    parser.add_argument("--keys", type=positive_int, default=4, help="needles in a text, one of them queried (4)")
    parser.add_argument(
        "--lengths", type=whole_numbers, default="128,256,512,1024", help="tokens of the test texts, with commas"
    )
    parser.add_argument("--depths", type=positive_int, default=5, help="depths from the beginning to the end (5)")
    parser.add_argument("--examples", type=positive_int, default=40, help="texts per length and depth (40)")
    parser.add_argument("--steps", type=positive_int, help="training steps of a tiny model (500)")
    parser.add_argument("--learning-rate", type=number(0, above=True), help="of a tiny model (5e-3)")
    parser.add_argument("--seed", type=seed, default=0, help="of the texts, and of tiny models (0)")
    parser.add_argument("--out", type=output_directory, default="runs/needle", help="figure and results (runs/needle)")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    _check(args)
    depths = tuple(number / max(1, args.depths - 1) for number in range(args.depths))
    maps = _trained(args, depths) if args.model else _tiny(args, depths)
    from mdn.common.plots import save_figure
    from mdn.common.results import provenance, write_results
    from mdn.evaluation.needle import draw

    content = {"lengths": args.lengths, "depths": depths, "found": maps, "provenance": provenance(args.seed)}
    for path in (args.out / "results.json", args.json):
        write_results(path, "needle", content)
    for label, scores in maps.items():
        means = ", ".join(f"{length}: {100 * mean:.0f} %" for length, mean in zip(args.lengths, scores.mean(axis=0)))
        print(f"{label}: found at {means}")
    print(f"heat-map: {save_figure(draw(content), args.out / 'needle.png')[0]}")


def _check(args: argparse.Namespace) -> None:
    """Fills in what tiny models need, or refuses it for a model that is trained already."""
    for name, default in TRAINING_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.model:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is for tiny models that are trained here; it cannot be combined with --model")


def _tiny(args: argparse.Namespace, depths: tuple[float, ...]) -> dict[str, Any]:
    from mdn.common.loading import import_plugins_of_environment
    from mdn.experiments.tiny_needle import NeedleSettings, find_needles, train_finder
    from mdn.layers import MIXERS

    import_plugins_of_environment()
    unknown = [mixer for mixer in args.mixers if mixer not in MIXERS]
    if unknown:
        raise ValueError(f"--mixers {','.join(unknown)} is unknown; expected some of {', '.join(sorted(MIXERS))}")
    settings = NeedleSettings(
        haystack=args.haystack,
        keys=args.keys,
        test_lengths=args.lengths,
        depths=depths,
        examples=args.examples,
        steps=args.steps,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    settings.check()
    maps = {}
    for mixer in args.mixers:
        model, outcome = train_finder(mixer, settings)
        if outcome.diverged_at is not None:
            print(f"{mixer}: the loss stopped being finite at step {outcome.diverged_at}")
        maps[mixer] = find_needles(model, settings)
    return maps


def _trained(args: argparse.Namespace, depths: tuple[float, ...]) -> dict[str, Any]:
    from mdn.common.loading import load
    from mdn.evaluation.needle import find_needles_in_text

    model, tokenizer = load(args.model)
    options: dict[str, Any] = {
        "examples": args.examples,
        "haystack": args.haystack,
        "keys": args.keys,
        "seed": args.seed,
    }
    return {args.model: find_needles_in_text(model, tokenizer, args.lengths, depths, **options)}

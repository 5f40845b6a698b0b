"""`mdn train RECIPE [key=value ...]`: train a model, or go on where an interrupted run stopped."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HELP = "train a model from a recipe; an interrupted run goes on where it stopped"
EXAMPLE = "mdn train recipes/demo.yaml model.mixer=gated_deltanet training.steps=200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a packaged recipe such as demo or paper/mdn_400M")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, with dotted keys")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, sizes and the launch line")
    parser.add_argument("--nodes", type=int, default=1, help="for --dry-run: number of machines (default 1)")
    parser.add_argument(
        "--devices", type=int, default=None, help="for --dry-run: devices per machine (default: all here)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results (or the plan) to FILE")


def run(args: argparse.Namespace) -> int:
    from mdn.training.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    if args.dry_run:
        return _dry_run(recipe, args)
    from mdn.training.monitor import NonFiniteError
    from mdn.training.run import train
    from mdn.training.trainer import is_first_rank

    try:
        result = train(recipe)
    except NonFiniteError as error:
        print(f"mdn: training stopped: {error}", file=sys.stderr)
        return 1
    if not is_first_rank():
        return 0
    if result.summary is None:
        print(f"stopped at step {result.step}; saved in {result.run_dir}; the same command goes on from there")
        return 0
    print_summary(result.summary, result.run_dir)
    if args.json:
        args.json.write_text(json.dumps(result.summary, indent=1, default=str))
    return 0


def _dry_run(recipe, args: argparse.Namespace) -> int:
    import dataclasses

    import torch

    from mdn.training.plan import describe, make_plan
    from mdn.training.recipe import to_yaml

    devices = args.devices or max(torch.cuda.device_count(), 1)
    if args.nodes < 1 or devices < 1:
        raise ValueError(f"--nodes and --devices must be at least 1, got {args.nodes} and {devices}")
    plan = make_plan(recipe, args.recipe, args.overrides, args.nodes, devices)
    print(to_yaml(recipe))
    print(describe(recipe, plan))
    if args.json:
        args.json.write_text(
            json.dumps({"recipe": recipe.model_dump(mode="json"), **dataclasses.asdict(plan)}, indent=1)
        )
    return 0


def print_summary(summary: dict, run_dir: Path) -> None:
    """Held-out bits per byte beside the references, and where everything is."""
    held_out = summary["held_out"]
    print(
        f"\n{summary['name']}: {summary['mixer']}, {summary['parameters']:,} parameters, {summary['tokens']:,} tokens"
    )
    print(f"held-out text: {held_out['documents']} documents, {held_out['bytes']:,} bytes; bits per byte:")
    rows = {"this model": held_out["bits_per_byte"], **summary.get("references", {})}
    for name, bits in sorted(rows.items(), key=lambda row: -row[1]):
        print(f"  {name:<14} {bits:6.3f}  {'█' * round(bits * 5)}")
    print(f"perplexity {held_out['perplexity']:.2f} per token")
    if summary.get("sample"):
        print("\na completion:\n" + "\n".join(f"  | {line}" for line in summary["sample"].splitlines()))
    plots = ", ".join(name for name in ("loss.png", "gates.png") if (run_dir / name).is_file())
    print(f"\nmodel and card: {run_dir / 'model'}; plots: {plots} in {run_dir}")

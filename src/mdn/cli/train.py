"""`mdn train RECIPE [key=value ...]`: train a model, or resume an interrupted run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdn.cli.options import add_output_arguments, positive_int
from mdn.common.results import write_results

if TYPE_CHECKING:
    from mdn.training.recipe import Recipe

HELP = "train a model from a recipe; an interrupted run resumes where it stopped"
EXAMPLE = "mdn train recipes/demo.yaml model.mixer=gated_deltanet training.steps=200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        help="a YAML file, the name of a packaged recipe such as demo or paper/mdn_400M, or a run folder to resume",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, with dotted keys")
    parser.add_argument("--fields", action="store_true", help="print every key of a recipe with default and meaning")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, sizes and the launch line")
    parser.add_argument("--nodes", type=positive_int, default=1, help="for --dry-run: number of machines (default 1)")
    parser.add_argument(
        "--devices", type=positive_int, help="for --dry-run: devices per machine (default: all of this machine)"
    )
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> int:
    from mdn.training.recipe import field_table, load_recipe

    if args.fields:
        print(field_table())
        return 0
    if args.recipe is None:
        raise ValueError("give a recipe: a YAML file, the name of a packaged recipe (demo), or a run folder")
    recipe = load_recipe(args.recipe, args.overrides)
    return _dry_run(recipe, args) if args.dry_run else train_and_show(recipe, args.json)


def train_and_show(recipe: Recipe, file: Path | None) -> int:
    """Train, print the results, and write them to `file` if there is one."""
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
    if result.summary is None and not result.is_resumable:
        if result.step == 0:
            print("stopped before the first step; nothing was saved; to begin again, run the same command")
        else:
            print("stopped before training went on; nothing new was saved; to go on, run the same command")
        return 0
    if result.summary is None:
        again = _command("train", str(result.run_dir))
        print(f"stopped at step {result.step}; saved in {result.run_dir}; resume with: {again}")
        return 0
    print_summary(result.summary, result.run_dir)
    write_results(file, "training", result.summary)
    return 0


def _dry_run(recipe: Recipe, args: argparse.Namespace) -> int:
    import dataclasses

    import torch

    from mdn.training.recipe import to_yaml
    from mdn.training.run_plan import describe, make_plan

    devices = args.devices or max(torch.cuda.device_count(), 1)
    plan = make_plan(recipe, args.recipe, args.overrides, args.nodes, devices)
    print(to_yaml(recipe))
    print(describe(recipe, plan))
    write_results(args.json, "plan", {"recipe": recipe.model_dump(mode="json"), **dataclasses.asdict(plan)})
    return 0


def print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    """Held-out bits per byte beside the references, where everything is, and what to type next."""
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
    for note in summary.get("notes", ()):
        print(f"note: {note}")
    plots = ", ".join(name for name in ("loss.png", "gates.png") if (run_dir / name).is_file())
    print(f"\nmodel and card: {run_dir / 'model'}; plots: {plots or 'none'} in {run_dir}")
    print("next:")
    for line in next_commands(summary, run_dir):
        print(f"  {line}")


def next_commands(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """What can be done with a finished run; a test executes these."""
    run = str(run_dir)
    return [
        _command("generate", run, "--prompt", "def "),
        _command("report", run, "--out", str(run_dir / "report.html")),
        _command("analyze", "state-norm", run, "--text", str(run_dir / "recipe.yaml"), "--tokens", "32"),
        _command("train", run, f"training.steps={2 * summary['steps']}") + "    # train longer",
    ]


def _command(*words: str) -> str:
    """A command line that works in this shell: `mdn`, or the path it was started by when PATH has another or none."""
    started = Path(sys.argv[0])
    found = shutil.which("mdn")
    if started.name == "mdn" and started.exists() and (found is None or not started.samefile(found)):
        return shlex.join([os.path.relpath(started), *words])
    return shlex.join(["mdn", *words])

"""`mdn mqar`: train and test a grid of small models on multi-query associative recall."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import add_output_arguments, output_directory, positive_int
from mdn.common.results import write_results

HELP = "multi-query associative recall: a grid of mixers, learning rates and seeds, with a table and a figure"
EXAMPLE = "mdn mqar recipes/mqar/quick.yaml --processes 2 seeds=[0,1,2]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file, or the name of a packaged one: quick, rewrite, paper")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of the recipe")
    parser.add_argument(
        "--out", type=output_directory, help="where results go; finished cells there are kept (runs/<name>)"
    )
    parser.add_argument("--processes", type=positive_int, help="cells at the same time, one thread each (one per core)")
    parser.add_argument("--save-models", action="store_true", help="keep the trained models of the cells that run")
    parser.add_argument("--list", action="store_true", help="only say which cells there are and which are finished")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    from mdn.common.results import provenance
    from mdn.common.workers import processes_from
    from mdn.evaluation.mqar.grid import finished, run_grid
    from mdn.evaluation.mqar.recipe import load_mqar_recipe

    processes = processes_from(args.processes)
    recipe = load_mqar_recipe(args.recipe, args.overrides)
    out = args.out or Path("runs") / recipe.name
    if args.list:
        done = finished(recipe, out)
        for cell in recipe.cells():
            print(f"{'done ' if cell.name in done else 'to do'} {cell.name}")
        return
    results = run_grid(recipe, out, processes, args.save_models)
    from mdn.evaluation.mqar.report import as_json, choose, draw, table

    chosen = choose(results)
    text = table(recipe, chosen)
    (out / "table.md").write_text(text)
    content = {**as_json(recipe, chosen), "provenance": provenance(seed=None)}
    for path in {out / "results.json", *([args.json] if args.json else [])}:
        write_results(path, "mqar", content)
    figures = draw(recipe, chosen, out / "accuracy.png")
    print(
        text + f"\naccuracy in %, mean ± standard deviation over seeds; columns are length:pairs; figure: {figures[0]}"
    )

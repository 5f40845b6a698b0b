"""`mdn mqar`: train and test a grid of small models on multi-query associative recall."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import add_output_arguments, output_directory, positive_int

HELP = "multi-query associative recall: a grid of mixers, learning rates and seeds, with a table and a figure"
EXAMPLE = "mdn mqar recipes/mqar/quick.yaml --processes 2 seeds=[0,1,2] mixers=[momentum_deltanet,kda]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file, or the name of a packaged one: quick, rewrite, paper")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="change a key of the recipe")
    parser.add_argument(
        "--out", type=output_directory, help="where results go; finished cells there are reused (runs/<name>)"
    )
    parser.add_argument("--processes", type=positive_int, help="cells at the same time, one thread each (one per core)")
    parser.add_argument("--save-models", action="store_true", help="keep the trained models of the cells that run")
    parser.add_argument("--list", action="store_true", help="only say which cells there are and which are finished")
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    from functools import partial

    import yaml

    from mdn.common.files import write_atomically
    from mdn.common.plots import save_figure
    from mdn.common.results import provenance, write_results
    from mdn.common.workers import processes_from
    from mdn.experiments.grid import finished, run_grid
    from mdn.experiments.mqar import load_mqar_recipe, train_and_test
    from mdn.experiments.mqar_results import choose, draw, tables

    processes = processes_from(args.processes)
    recipe = load_mqar_recipe(args.recipe, args.overrides)
    out = args.out or Path("runs") / recipe.name
    if args.list:
        done = finished(recipe.cells(), out)
        for cell in recipe.cells():
            print(f"{'done ' if cell.name in done else 'to do'} {cell.name}")
        return
    resolved = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)
    write_atomically(out / "recipe.yaml", resolved.encode())
    job = partial(train_and_test, save_to=out / "models" if args.save_models else None)
    results = run_grid(recipe.cells(), job, out, processes, recipe.name)
    chosen = choose(results.values())
    minutes = sum(result.get("processor_seconds", 0.0) for result in results.values()) / 60
    content = {
        "recipe": recipe.model_dump(mode="json"),
        "cells": len(results),
        "processor_minutes": round(minutes, 1),
        "chosen": chosen,
        "provenance": provenance(seed=None),
    }
    shown = "\n\n".join(map(str, tables(content)))
    write_atomically(out / "table.md", f"{shown}\n".encode())
    for path in (out / "results.json", args.json):
        write_results(path, "mqar", content)
    print(f"{shown}\n\nfigure: {save_figure(draw(content), out / 'accuracy.png')[0]}")

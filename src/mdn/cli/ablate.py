"""`mdn ablate`: the paper's ablation rows at a scale of two cores, resumable."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, output_directory, output_file, positive_int, whole_number

HELP = "the paper's ablations at a small scale: loss, divergence, and whether it is arithmetic or dynamics"
EXAMPLE = "mdn ablate --rows components --seeds 2 --out runs/ablate --plot ablations.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", default="all", help="all, groups or row names, separated by commas (all)")
    parser.add_argument("--seeds", type=positive_int, default=3, help="seeds 0, 1, ... per row (3)")
    parser.add_argument(
        "--paper-seeds",
        type=whole_number(),
        default=1,
        help="of them, how many also with the paper's log-domain arithmetic (1)",
    )
    parser.add_argument("--steps", type=positive_int, default=200, help="optimiser steps per run (200)")
    parser.add_argument("--paper-steps", type=positive_int, default=80, help="steps with the paper's arithmetic (80)")
    parser.add_argument("--batch-tokens", type=positive_int, default=2048, help="tokens of a step (2048)")
    parser.add_argument("--text", metavar="PATH", help="train on this file or folder (the Python standard library)")
    parser.add_argument("--out", type=output_directory, default="runs/ablate", help="where the runs are (runs/ablate)")
    parser.add_argument("--processes", type=positive_int, help="cells at the same time, one thread each (one per core)")
    parser.add_argument(
        "--only-read", action="store_true", help="train nothing: show the table of the recorded results"
    )
    parser.add_argument("--add-to", type=output_file, metavar="FILE", help="add the rows to the results in FILE")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from functools import partial

    from mdn.common.results import command_line, read_results, write_results
    from mdn.common.workers import processes_from
    from mdn.experiments.ablation_cells import AblationScale, ablation_cells, choose_rows, train_ablation
    from mdn.experiments.ablation_results import added, draw, summarise, tables
    from mdn.experiments.grid import run_grid

    scale = AblationScale(
        steps=args.steps, paper_steps=args.paper_steps, batch_tokens=args.batch_tokens, text=args.text
    )
    recorded = None if args.add_to is None else read_results(args.add_to, "ablations")
    cells = ablation_cells(choose_rows(args.rows), args.seeds, args.paper_seeds, scale)
    processes = 0 if args.only_read else processes_from(args.processes)
    results = list(run_grid(cells, partial(train_ablation, out=args.out), args.out, processes, "ablations").values())
    if not results:
        raise ValueError(f"--out {args.out} holds no finished cell of these rows")
    content = {"scale": vars(scale), "cells": len(results), "of": len(cells), "rows": summarise(results)}
    print(*tables(content), sep="\n\n")
    minutes = sum(result["seconds"] for result in results) / 60
    print(f"\n{minutes:.1f} minutes of training")
    for path in (args.out / "results.json", args.json):
        write_results(path, "ablations", content)
    if recorded is not None:
        content = added(recorded, content, command_line())
        write_results(args.add_to, "ablations", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

"""`mdn ablate`: the paper's ablation rows at a scale of two cores, resumable."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import add_output_arguments, output_directory, positive_int, whole_number
from mdn.common.results import write_results

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
    parser.add_argument(
        "--out", type=output_directory, default=Path("runs/ablate"), help="where the runs are (runs/ablate)"
    )
    parser.add_argument("--processes", type=positive_int, help="cells at the same time, one thread each (one per core)")
    parser.add_argument("--only-read", action="store_true", help="train nothing: the table of what is there")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.analysis.ablation import Scale, cells, run_grid
    from mdn.analysis.ablation_rows import choose_rows
    from mdn.analysis.ablation_table import draw, summarise, table
    from mdn.common.workers import processes_from

    scale = Scale(steps=args.steps, paper_steps=args.paper_steps, batch_tokens=args.batch_tokens, text=args.text)
    grid = cells(choose_rows(args.rows), args.seeds, args.paper_seeds)
    results = run_grid(grid, scale, args.out, 0 if args.only_read else processes_from(args.processes))
    if not results:
        raise ValueError(f"--out {args.out} holds no finished cell of these rows")
    rows = summarise(results)
    print(table(rows))
    minutes = sum(result["seconds"] for result in results) / 60
    print(f"\n{len(results)} of {len(grid)} cells, {minutes:.1f} minutes of training")
    found = {"scale": vars(scale), "cells": len(results), "of": len(grid), "rows": rows}
    write_results(args.json, "ablations", found)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(found), args.plot)

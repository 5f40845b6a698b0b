"""`mdn analyze causality`: train with blockwise momentum, decode stepwise, show the mismatch."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdn.cli.options import add_output_arguments, names, output_directory, positive_int, whole_numbers
from mdn.common.results import write_results

HELP = "blockwise against stepwise momentum: train tiny models with blocks, evaluate them both ways"
EXAMPLE = "mdn analyze causality --tasks rewriting --blocks 1,16,64 --seeds 2 --plot causality.png"
TASKS = ("rewriting", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=names, default=list(TASKS), help="rewriting, text or both (rewriting,text)")
    parser.add_argument("--blocks", type=whole_numbers, default=(1, 16, 64), help="block sizes to train with (1,16,64)")
    parser.add_argument("--seeds", type=positive_int, default=2, help="seeds 0, 1, ... (2)")
    parser.add_argument("--steps", type=positive_int, default=700, help="optimiser steps on the rewriting task (700)")
    parser.add_argument("--text-steps", type=positive_int, default=200, help="optimiser steps on text (200)")
    parser.add_argument(
        "--out", type=output_directory, default=Path("runs/causality"), help="result files (runs/causality)"
    )
    parser.add_argument("--only-read", action="store_true", help="train nothing: the table of what is there")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if not args.tasks or not set(args.tasks) <= set(TASKS):
        raise ValueError(f"--tasks must be among {', '.join(TASKS)}, got {','.join(args.tasks)!r}")
    from mdn.analysis.causality import Cell, draw, run_cell, table

    steps = {"rewriting": args.steps, "text": args.text_steps}
    grid = [
        Cell(task, block, seed, steps[task])
        for seed in range(args.seeds)
        for task in args.tasks
        for block in args.blocks
    ]
    chosen = [cell for cell in grid if not args.only_read or cell.path(args.out).is_file()]
    if not chosen:
        raise ValueError(f"--out {args.out} holds no finished cell of these")
    results = [run_cell(cell, args.out) for cell in chosen]
    results.sort(key=lambda r: (r["cell"]["task"], r["cell"]["block_size"], r["cell"]["seed"]))
    print(table(results))
    worst = max(float(result["decoding"]) for result in results)
    print(f"\n{len(results)} of {len(grid)} cells; stepwise logits differ from real decoding by at most {worst:.1e}")
    found = {"results": results, "of": len(grid)}
    write_results(args.json, "causality", found)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(found), args.plot)

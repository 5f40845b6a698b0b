"""`mdn analyze causality`: train with blockwise momentum, decode stepwise, show the mismatch."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, names, output_directory, positive_int, whole_numbers

HELP = "blockwise against stepwise momentum: train tiny models with blocks, evaluate them both ways"
EXAMPLE = "mdn analyze causality --tasks rewriting --blocks 1,16,64 --seeds 2 --plot causality.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks", type=names, default="rewriting,text", help="rewriting, text or both (rewriting,text)"
    )
    parser.add_argument("--blocks", type=whole_numbers, default="1,16,64", help="block sizes to train with (1,16,64)")
    parser.add_argument("--seeds", type=positive_int, default=2, help="seeds 0, 1, ... (2)")
    parser.add_argument("--steps", type=positive_int, default=700, help="optimiser steps on the rewriting task (700)")
    parser.add_argument("--text-steps", type=positive_int, default=200, help="optimiser steps on text (200)")
    parser.add_argument("--out", type=output_directory, default="runs/causality", help="result files (runs/causality)")
    parser.add_argument("--processes", type=positive_int, help="cells at the same time, one thread each (one per core)")
    parser.add_argument(
        "--only-read", action="store_true", help="train nothing: show the table of the recorded results"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from functools import partial

    from mdn.common.results import write_results
    from mdn.common.workers import processes_from
    from mdn.experiments.causality import TASKS, CausalityCell, draw, tables, train_both_ways
    from mdn.experiments.grid import run_grid

    if not args.tasks or not set(args.tasks) <= set(TASKS):
        raise ValueError(f"--tasks must be among {', '.join(TASKS)}, got {','.join(args.tasks)!r}")
    steps = {"rewriting": args.steps, "text": args.text_steps}
    cells = [
        CausalityCell(task, block, seed, steps[task])
        for seed in range(args.seeds)
        for task in args.tasks
        for block in args.blocks
    ]
    processes = 0 if args.only_read else processes_from(args.processes)
    results = list(run_grid(cells, partial(train_both_ways, out=args.out), args.out, processes, "causality").values())
    if not results:
        raise ValueError(f"--out {args.out} holds no finished cell of these")
    results.sort(key=lambda r: (r["cell"]["task"], r["cell"]["block_size"], r["cell"]["seed"]))
    content = {"results": results, "of": len(cells)}
    print(*tables(content), sep="\n\n")
    worst = max(result["decoding"] for result in results)
    print(f"\n{len(results)} of {len(cells)} cells; stepwise logits differ from real decoding by at most {worst:.1e}")
    for path in (args.out / "results.json", args.json):
        write_results(path, "causality", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

"""`mdn study`: where momentum pays. Resumable grids on a few cores, with tables, intervals and figures."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from mdn.cli.options import add_output_arguments, names, number, output_directory, positive_int

HELP = "where momentum pays: retrieval, oscillation, forecasting, state tracking, language and the ablation"
EXAMPLE = "mdn study oscillation --processes 2 --limit-minutes 20"
RECORDED = Path("docs/experiments/data/studies")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", nargs="?", help="the name of a study, or all")
    parser.add_argument("--list", action="store_true", help="the studies, how much of each is recorded, what is left")
    parser.add_argument("--tasks", type=names, default=[], help="only these tasks of the study, with commas (all)")
    parser.add_argument("--models", type=names, default=[], help="only these models, by name, with commas (all)")
    parser.add_argument("--seeds", type=positive_int, help="seeds 0, 1, ... of every model (5; language 2)")
    parser.add_argument(
        "--rate",
        type=number(0, above=True),
        metavar="LR",
        help="also run the seeds at this learning rate, chosen or not",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two models, four steps: only whether it runs")
    parser.add_argument(
        "--limit-minutes",
        type=number(0),
        metavar="N",
        help="begin no cell that would not be done after N minutes; 0: only read",
    )
    parser.add_argument("--processes", type=positive_int, help="cells at the same time, one thread each (one per core)")
    parser.add_argument(
        "--out",
        type=output_directory,
        help=f"where cells are kept and found ({RECORDED} in the repository, else runs/studies; with --quick "
        "runs/studies-quick)",
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.common.workers import processes_from
    from mdn.experiments.grid import TimeLimit
    from mdn.experiments.studies.catalogue import choose_studies
    from mdn.experiments.studies.summary import summarise, tables

    if args.study is None and not args.list:
        raise ValueError("give the name of a study, or all; `mdn study --list` shows them")
    if args.study in (None, "all") and (args.json or args.plot):
        raise ValueError("--json and --plot are for one study, got all")
    processes = processes_from(args.processes)
    studies = [study.only(args.tasks, args.models) for study in choose_studies(args.study or "all")]
    if args.quick:
        studies = [study.shortened() for study in studies]
    if args.seeds is not None:
        studies = [study.with_seeds(args.seeds) for study in studies]
    if args.rate is not None:
        for study in studies:
            study.check_rate(args.rate)
    out = args.out or _default_out(args.quick)
    for study in studies:
        progress = study.progress(out)
        left = f"{progress.seconds_left / 60 / processes:.0f} minutes of {processes} quiet cores left"
        print(f"{study.name}: {progress.cells} of {progress.of} cells recorded in {out}, about {left}", flush=True)
    if args.list:
        return
    limit = None if args.limit_minutes is None else TimeLimit(time.time() + 60 * args.limit_minutes)
    for study in studies:
        study.run(out, 0 if args.limit_minutes == 0 else processes, limit)
        if args.rate is not None:
            study.run_at(args.rate, out, 0 if args.limit_minutes == 0 else processes, limit)
        content = summarise(study, out)
        print(f"\n{study.name}: {content['cells']} of {content['of']} cells recorded", *tables(content), sep="\n\n")
    if args.json or args.plot:
        _write(content, args)


def _write(content: dict[str, Any], args: argparse.Namespace) -> None:
    from mdn.common.plots import save_figure
    from mdn.common.results import write_results
    from mdn.experiments.studies.summary import draw, tables

    write_results(args.json, "study", content)
    if args.plot is not None:
        if not tables(content):
            raise ValueError("--plot: no cell with a chosen learning rate is recorded yet")
        save_figure(draw(content), args.plot)


def _default_out(quick: bool) -> Path:
    if quick:
        return Path("runs/studies-quick")
    return RECORDED if RECORDED.is_dir() else Path("runs/studies")

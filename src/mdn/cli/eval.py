"""`mdn eval`: the paper's evaluations, or any task of lm-evaluation-harness, for one or several models."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from mdn.cli.options import (
    add_loading_arguments,
    add_output_arguments,
    names,
    output_directory,
    output_file,
    positive_int,
    seed,
    whole_numbers,
)
from mdn.common.results import write_results

HELP = "the paper's evaluations through lm-evaluation-harness, one or several models side by side"
OPTIONS_OF_ONE_SUITE = {"lengths": "needle", "haystack": "needle", "plot": "needle", "recipe": "mqar"}
"""options that one suite alone reads, with its name"""
REFUSED_BY_MQAR = ("device", "dtype", "limit", "max_length")
"""options that would apply to every suite, but not to mqar: it is refused together with them"""
HARNESS_DEFAULTS: dict[str, Any] = {
    "data": (),
    "skip_missing": False,
    "batch_size": 8,
    "seed": 0,
    "out": Path("runs/eval"),
    "device": "auto",
    "dtype": "auto",
}
"""options of what runs through the harness (all but mqar), with the values of those that are not given"""
EXAMPLE = "mdn eval runs/demo --suite perplexity --data my_files --limit 100 --batch-size 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="run folders, model directories (with tokenizer) or Hub ids"
    )
    parser.add_argument(
        "--suite",
        type=names,
        default=[],
        help="one or more of perplexity, commonsense, retrieval, longbench, needle, mqar (with commas)",
    )
    parser.add_argument(
        "--tasks", type=names, default=[], help="any tasks, groups or tags of lm-evaluation-harness, with commas"
    )
    parser.add_argument("--data", type=Path, action="append", metavar="DIR", help="local files, no Hub (repeatable)")
    parser.add_argument(
        "--skip-missing", action="store_true", default=None, help="leave out tasks whose data is missing"
    )
    parser.add_argument("--limit", type=positive_int, help="only the first N examples of every task")
    parser.add_argument("--batch-size", type=positive_int, help="changes no score (8)")
    parser.add_argument("--max-length", type=positive_int, help="tokens of input and output (default: the suite's)")
    parser.add_argument(
        "--lengths", type=whole_numbers, help="haystack lengths for needle, with commas (1024,...,16384)"
    )
    parser.add_argument("--haystack", help="for needle: a text file, or stdlib; default: RULER's essays from the Hub")
    parser.add_argument("--recipe", help="for mqar: the recipe whose test segments are used (quick)")
    parser.add_argument("--seed", type=seed, help="of the harness (0)")
    add_loading_arguments(parser)
    parser.set_defaults(dtype=None, device=None)
    parser.add_argument("--out", type=output_directory, help="result files; existing ones are reused (runs/eval)")
    add_output_arguments(parser, plot=False)
    parser.add_argument("--markdown", metavar="FILE", type=output_file, help="write the table as Markdown")
    parser.add_argument("--plot", metavar="FILE", type=output_file, help="for needle: the heat-map (OUT/needle.png)")


def run(args: argparse.Namespace) -> None:
    _check(args)
    for name, default in HARNESS_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.data:
        # Must be set before the libraries are imported: with local data nothing may access the network.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from mdn.evaluation.suites import SUITE_NAMES, SUITES, Job, needle_suite

    unknown = [name for name in args.suite if name not in SUITE_NAMES]
    if unknown:
        raise ValueError(f"--suite {','.join(unknown)} is unknown; expected some of {', '.join(SUITE_NAMES)}")
    needles = {} if args.lengths is None else {"lengths": args.lengths}
    suites = [needle_suite(**needles) if name == "needle" else SUITES[name] for name in args.suite if name != "mqar"]
    tasks = [Job(task, args.max_length) for task in _tasks(args.tasks)]
    results, skipped = _harness_results(args, suites, tasks)
    if "mqar" in args.suite:
        suites.append(_mqar(args, results))
    _report(args, suites, tasks, results, skipped)


def _tasks(requested: list[str]) -> list[str]:
    """Each once, in the given order; groups and tags of the harness mean their tasks."""
    if not requested:
        return []
    from mdn.evaluation.definitions import tasks_named

    return list(dict.fromkeys(task for name in requested for task in tasks_named(name)))


def _check(args: argparse.Namespace) -> None:
    if not args.suite and not args.tasks:
        raise ValueError("give --suite or --tasks")
    for folder in args.data or ():
        if not folder.is_dir():
            raise ValueError(f"--data {folder} is not a directory")
    for name, suite in OPTIONS_OF_ONE_SUITE.items():
        if getattr(args, name) is not None and suite not in args.suite:
            raise ValueError(f"--{name} is for --suite {suite}, which is not asked for")
    if "mqar" not in args.suite:
        return
    for name in REFUSED_BY_MQAR:
        if getattr(args, name) is not None:
            raise ValueError(
                f"{_option(name)} cannot be combined with --suite mqar: whole test segments run on the CPU, as saved"
            )
    runs_harness = args.suite != ["mqar"] or bool(args.tasks)
    for name in HARNESS_DEFAULTS:
        if not runs_harness and getattr(args, name) is not None:
            raise ValueError(
                f"{_option(name)} has no effect on --suite mqar: the test segments are those of its recipe, and "
                "results are kept with --json"
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _labels(models: list[str]) -> list[str]:
    """Short names of models: the last part of the path that is not `model`, or the whole if that is not unique."""
    short = [(Path(m).parent if Path(m).name == "model" else Path(m)).name or m for m in models]
    return short if len(set(short)) == len(short) else models


def _harness_results(args: argparse.Namespace, suites: list, tasks: list) -> tuple[dict[str, Any], list[str]]:
    results: dict[str, Any] = {label: {} for label in _labels(args.models)}
    if not suites and not tasks:
        return results, []
    import dataclasses

    from mdn.common.loading import choose_device, load, resolve_model
    from mdn.evaluation.harness import Settings, Subject
    from mdn.evaluation.jobs import jobs_of, refuse_missing_files, run_jobs

    haystack = _haystack(args.haystack)
    fingerprint = None if haystack is None else hashlib.sha256(haystack.encode()).hexdigest()
    data = tuple(args.data)
    settings = Settings(args.out, data, args.limit, args.batch_size, args.seed, fingerprint)
    jobs = [*jobs_of(suites), *tasks]
    if args.max_length is not None:
        suites[:] = [_with_length(suite, args.max_length) for suite in suites]
        jobs = [dataclasses.replace(job, max_length=args.max_length) for job in jobs]
    # Bad input is refused before the first model is loaded.
    sources, device = [resolve_model(source) for source in args.models], choose_device(args.device)
    if not args.skip_missing:
        refuse_missing_files(jobs, data)
    skipped: list[str] = []
    for label, source in zip(results, sources):
        # One model in memory at a time.
        model, tokenizer = load(source, args.dtype, device)
        subject = Subject(label, source, model, tokenizer)
        outcome = run_jobs(
            list(dict.fromkeys(jobs)), [subject], settings, skip_missing=args.skip_missing, haystack=haystack
        )
        results |= outcome.results
        skipped = outcome.skipped
    return results, skipped


def _with_length(suite: Any, length: int) -> Any:
    import dataclasses

    def changed(column: Any) -> Any:
        return dataclasses.replace(column, job=dataclasses.replace(column.job, max_length=length))

    return dataclasses.replace(suite, columns=tuple(map(changed, suite.columns)))


def _haystack(choice: str | None) -> str | None:
    if choice is None:
        return None
    if choice == "stdlib":
        from mdn.evaluation.needle import documentation_text

        return documentation_text()
    if not Path(choice).is_file():
        raise ValueError(f"--haystack must be a text file or stdlib, got {choice!r}")
    return Path(choice).read_text(encoding="utf-8")


def _mqar(args: argparse.Namespace, results: dict[str, Any]) -> Any:
    from mdn.common.loading import load_model
    from mdn.experiments.mqar import load_mqar_recipe
    from mdn.experiments.mqar_results import mqar_results, mqar_suite

    recipe = load_mqar_recipe(args.recipe or "quick")
    for label, source in zip(results, args.models):
        results[label] |= mqar_results(load_model(source), recipe)
    return mqar_suite(recipe)


def _report(args: argparse.Namespace, suites: list, tasks: list, results: dict[str, Any], skipped: list[str]) -> None:
    from mdn.common.results import provenance
    from mdn.evaluation.tables import as_json, as_markdown, as_text, columns_of_tasks, make_table

    shown = [*suites, *([columns_of_tasks(tasks, results)] if tasks else [])]
    table = make_table(shown, results)
    table.notes.extend(f"skipped {line}" for line in skipped)
    print(as_text(table), end="")
    if args.markdown:
        args.markdown.write_text(as_markdown(table))
    if args.json:
        found = {label: {job.name: result for job, result in rows.items()} for label, rows in results.items()}
        content = {"table": as_json(table), "results": found, "provenance": provenance(args.seed)}
        write_results(args.json, "eval", content)
    needle = next((suite for suite in suites if suite.name == "needle"), None)
    if needle is not None:
        from mdn.common.plots import save_figure
        from mdn.evaluation.needle import draw_suite

        print(f"heat-map: {save_figure(draw_suite(needle, results), args.plot or args.out / 'needle.png')[0]}")

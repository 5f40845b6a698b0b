"""`mdn bench op`: speed, memory and accuracy of the momentum delta rule beside its peers, in one run."""

from __future__ import annotations

import argparse
from typing import Any

from mdn.cli.options import add_output_arguments, positive_int

HELP = "the momentum delta rule against its peers: time, memory, accuracy"
EXAMPLE = "mdn bench op --json op.json --plot op.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and few repeats: a short smoke benchmark, not for a record"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--accuracy", action="store_true", help="only the table of errors over log_mu")
    only.add_argument("--general", action="store_true", help="only the direct write, the look-ahead and vector decays")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure (cpu)")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="threads of torch (default: torch's choice)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from mdn.bench.op_results import draw, remarks, tables
    from mdn.common.results import write_results

    if args.plot and (args.accuracy or args.general):
        only = "--accuracy" if args.accuracy else "--general"
        raise ValueError(f"--plot draws times per token, which {only} does not measure; leave one of them out")
    if args.device == "cuda" and args.general:
        raise ValueError("--general measures the CPU backends and the memory of a process; leave out --device")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch finds none here")
    try:
        content = _measure(args)
    except RuntimeError as error:  # a peer computes something else: no figure is worth showing
        print(f"mdn: benchmark stopped: {error}")
        return 1
    if not args.accuracy and not args.general:
        print("\n".join(remarks(content)) + "\n")
    print(*tables(content), sep="\n\n")
    write_results(args.json, "op", content)
    if args.plot:
        from mdn.common.plots import save_figure

        print("\nwrote " + " and ".join(map(str, save_figure(draw(content), args.plot))))
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from mdn.bench import op, op_general
    from mdn.bench.op_accuracy import accuracy_table

    if args.accuracy:
        return {"accuracy": accuracy_table(device=args.device)}
    if args.general:
        return {"general": op_general.run(quick=args.quick, threads=args.threads)}
    return op.run(quick=args.quick, threads=args.threads, device=args.device)

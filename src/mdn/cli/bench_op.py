"""`mdn bench op`: speed, memory and accuracy of the momentum delta rule beside its peers, in one run."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, positive_int
from mdn.common.results import write_results

HELP = "the momentum delta rule against its peers: time, memory, accuracy"
EXAMPLE = "mdn bench op --json op.json --plot op.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and few repeats: for a look, not for a record"
    )
    parser.add_argument("--accuracy", action="store_true", help="only the table of errors over log_mu")
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="threads of torch (default: as torch chooses)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from mdn.bench import op, op_report
    from mdn.bench.op_accuracy import accuracy_table

    if args.accuracy:
        if args.plot:
            raise ValueError("--plot draws times, which --accuracy does not measure; leave one of them out")
        results: dict = {"accuracy": accuracy_table()}
        text = op_report.accuracy_text(results["accuracy"])
    else:
        try:
            results = op.run(quick=args.quick, threads=args.threads)
        except RuntimeError as error:  # a peer computes something else: no figure is worth showing
            print(f"mdn: benchmark stopped: {error}")
            return 1
        text = op_report.report(results)
    print(text)
    write_results(args.json, "op", results)
    if args.plot:
        print("\nwrote " + " and ".join(map(str, op_report.plot(results, args.plot))))
    return 0

"""`mdn bench op`: speed, memory and accuracy of the momentum delta rule beside its peers, in one run."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

HELP = "the momentum delta rule against its peers: time, memory, accuracy"
EXAMPLE = "mdn bench op --json op.json --plot op.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and few repeats: for a look, not for a record"
    )
    parser.add_argument("--accuracy", action="store_true", help="only the table of errors over log_mu")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: as torch chooses)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time per token against T (PNG and SVG)")


def run(args: argparse.Namespace) -> int:
    from mdn.bench import op, op_report
    from mdn.bench.op_accuracy import accuracy_table

    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
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
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(_strict(results), indent=2, allow_nan=False) + "\n")
    if args.plot:
        print("\nwrote " + " and ".join(map(str, op_report.plot(results, args.plot))))
    return 0


def _strict(x: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as the words "inf", "-inf" and "nan"."""
    if isinstance(x, dict):
        return {key: _strict(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_strict(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x

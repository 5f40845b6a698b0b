"""The `mdn` command. Each subcommand is one module, imported only when it runs.

A command module offers HELP (one line), EXAMPLE (a command line), add_arguments(parser) and run(args) -> int | None.
Bad input is one clear line on stderr and exit code 2; set MDN_DEBUG=1 to see the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NoReturn

COMMANDS: dict[str, str | dict[str, str]] = {
    "demo": "mdn.cli.demo",
    "train": "mdn.cli.train",
    "generate": "mdn.cli.generate",
    "info": "mdn.cli.info",
    "convert": "mdn.cli.convert",
    "eval": "mdn.cli.eval",
    "mqar": "mdn.cli.mqar",
    "needle": "mdn.cli.needle",
    "ablate": "mdn.cli.ablate",
    "report": "mdn.cli.report",
    "bench": {
        "op": "mdn.cli.bench_op",
        "decode": "mdn.cli.bench_decode",
        "train": "mdn.cli.bench_train",
        "kernels": "mdn.cli.bench_kernels",
    },
    "analyze": {
        "spectra": "mdn.cli.analyze_spectra",
        "stability": "mdn.cli.analyze_stability",
        "state-norm": "mdn.cli.analyze_state_norm",
        "causality": "mdn.cli.analyze_causality",
    },
}

SUMMARIES = {
    "demo": "train a small model on the Python standard library and look at it",
    "train": "train a model from a recipe",
    "generate": "complete a prompt",
    "info": "parameters, state size and FLOPs of a model or config",
    "convert": "convert an FLA or Hugging Face checkpoint",
    "eval": "run the paper's evaluations",
    "mqar": "run a grid of associative-recall experiments",
    "needle": "needle-in-a-haystack over length and depth",
    "ablate": "the paper's ablations at a small scale",
    "report": "one self-contained page from run folders",
    "bench": "benchmarks, as ratios in one run",
    "analyze": "spectra, stability and state dynamics",
}


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument like every other bad input: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def build_parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser, with details only for the command that was asked for: others are not imported."""
    parser = _Parser(prog="mdn", description="Momentum DeltaNet")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = [word for word in arguments if not word.startswith("-")]
    for name, target in COMMANDS.items():
        wanted = bool(words) and words[0] == name
        if isinstance(target, str):
            _add_command(commands, name, target, SUMMARIES[name], wanted)
            continue
        group = commands.add_parser(name, help=SUMMARIES[name], description=SUMMARIES[name])
        subcommands = group.add_subparsers(dest="subcommand", metavar="WHAT", required=True)
        for sub, module in target.items():
            _add_command(subcommands, sub, module, None, wanted and (len(words) < 2 or words[1] == sub))
    return parser


def _add_command(commands, name: str, module_name: str, summary: str | None, load: bool) -> None:
    if not load:
        commands.add_parser(name, help=summary)
        return
    module = importlib.import_module(module_name)
    sub = commands.add_parser(
        name,
        help=summary or module.HELP,
        description=module.HELP,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(sub)
    sub.set_defaults(run=module.run)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        args = build_parser(arguments).parse_args(arguments)
        return args.run(args) or 0
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("MDN_DEBUG"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"mdn: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mdn: interrupted", file=sys.stderr)
        return 130

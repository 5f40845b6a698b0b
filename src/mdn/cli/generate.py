"""`mdn generate`: complete a prompt with a trained model, printing the text as it is made."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from mdn.cli.options import (
    WEIGHT_FORMATS,
    add_loading_arguments,
    add_output_arguments,
    number,
    positive_int,
    seed,
    temperature,
    whole_number,
)
from mdn.common.results import write_results

HELP = "complete a prompt with a trained model; the text appears as it is generated"
EXAMPLE = 'mdn generate runs/demo --prompt "def read_lines(path):" --max-new-tokens 100'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run folder, a model directory (with its tokenizer) or a Hub id")
    parser.add_argument("--prompt", help="the text to complete; without it, standard input is read")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="at most this many tokens (128)")
    parser.add_argument("--temperature", type=temperature, help="0 is greedy (0.8)")
    parser.add_argument(
        "--top-k", type=whole_number(), default=0, help="sample among the k likeliest tokens; 0: all (0)"
    )
    parser.add_argument(
        "--top-p",
        type=number(0, 1, above=True),
        default=1.0,
        help="sample among the likeliest tokens of this mass (1.0)",
    )
    parser.add_argument(
        "--beams", type=positive_int, default=1, help="beam search with this many beams, without streaming (1)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the sampling (0)")
    parser.add_argument("--prefill-chunk", type=positive_int, help="read a long prompt in pieces of this many tokens")
    parser.add_argument("--no-start-token", action="store_true", help="do not put the start-of-text token first")
    parser.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-text token")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, help="pack the weights, for speed on a CPU")
    add_loading_arguments(parser)
    add_output_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> None:
    _check(args)
    prompt = _prompt(args.prompt)
    import torch
    from transformers import TextStreamer

    from mdn.common.loading import load, start_token

    model, tokenizer = load(args.model, args.dtype, args.device, args.weights)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(torch.long)
    start = None if args.no_start_token else start_token(model, tokenizer)
    skipped = 0
    if start is not None:
        ids, skipped = torch.cat([torch.tensor([[start]]), ids], dim=1), 1
    if ids.shape[1] == 0:
        reason = "--no-start-token is given" if args.no_start_token else "the model has no start token"
        raise ValueError(f"--prompt is empty and {reason}: there is no token to begin with")
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
    facts = {"prompt": prompt, "completion": completion, "new_tokens": new, "seconds": seconds}
    write_results(args.json, "generate", facts)


def _check(args: argparse.Namespace) -> None:
    """Beam search looks for the likeliest text: what only sampling can follow is refused with it."""
    sampling = {"--temperature": args.temperature, "--top-k": args.top_k, "--top-p": args.top_p < 1}
    given = [option for option, value in sampling.items() if value]
    if args.beams > 1 and given:
        raise ValueError(f"{given[0]} cannot be combined with --beams {args.beams}: beam search does not sample")


def _prompt(given: str | None) -> str:
    """The option, or standard input; both must be text."""
    try:
        text = sys.stdin.read() if given is None else given
        text.encode()
    except UnicodeError:
        name = "standard input" if given is None else "--prompt"
        raise ValueError(f"{name} is not UTF-8 text; convert it first, for example with iconv") from None
    return text


def _settings(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    end = None if args.ignore_eos else tokenizer.eos_token_id
    chosen = 0.8 if args.temperature is None else args.temperature
    settings: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "num_beams": args.beams,
        "do_sample": chosen > 0 and args.beams == 1,
        "eos_token_id": end,
        "pad_token_id": 0 if end is None else end,
        "prefill_chunk_size": args.prefill_chunk,
    }
    if settings["do_sample"]:
        settings |= {"temperature": chosen, "top_k": args.top_k, "top_p": args.top_p}
    return settings

"""`mdn bench serve`: throughput, latency and memory of models inside vLLM."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_output_arguments, positive_int, whole_number, whole_numbers
from mdn.cli.serve import require_vllm

HELP = "tokens per second, latencies and memory in vLLM for MDN, GDN, a hybrid and attention at equal size"
EXAMPLE = "mdn bench serve --batches 1,4,16 --json serve.json --plot serve.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=whole_numbers, default="1,4,16", help="requests at once (1,4,16)")
    parser.add_argument("--contexts", type=whole_numbers, default="128,512,2048", help="for the memory (128,512,2048)")
    parser.add_argument("--prompt", type=positive_int, default=128, help="tokens of every prompt (128)")
    parser.add_argument("--answer", type=whole_number(2), default=64, help="tokens of every answer (64)")
    parser.add_argument("--hidden-size", type=positive_int, default=256, help="of every model (256)")
    parser.add_argument(
        "--layers",
        type=whole_number(4),
        default=4,
        help="of every model; every fourth of the hybrid's is attention (4)",
    )
    parser.add_argument("--rounds", type=positive_int, default=5, help="over all models per batch size (5)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    require_vllm("mdn bench serve")
    if args.hidden_size % 128:
        raise ValueError(
            f"--hidden-size must be a multiple of 128 (four heads that vLLM can serve), got {args.hidden_size}"
        )
    from mdn.bench.serving import MODELS, ServingSize, bench, draw, tables
    from mdn.common.results import write_results

    size = ServingSize(args.hidden_size, args.layers, prompt=args.prompt, answer=args.answer)
    content = bench(list(MODELS), sorted(args.batches), sorted(args.contexts), size, args.rounds)
    print(*tables(content), sep="\n\n")
    write_results(args.json, "serve", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

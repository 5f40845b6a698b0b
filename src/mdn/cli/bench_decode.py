"""`mdn bench decode`: latency per token and memory per sequence against context length, for every mixer."""

from __future__ import annotations

import argparse

from mdn.cli.options import WEIGHT_FORMATS, add_output_arguments, names, number, positive_int, whole_numbers

HELP = "decoding latency and memory against context length, every mixer at equal size, as ratios in one run"
EXAMPLE = "mdn bench decode --mixers momentum_deltanet,gated_deltanet,attention --plot decode.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixers", type=names, default="all", help="names separated by commas (all)")
    parser.add_argument(
        "--contexts", type=whole_numbers, default="128,512,2048,8192,32768", help="context lengths (128 to 32768)"
    )
    parser.add_argument("--batches", type=whole_numbers, default="1,16", help="batch sizes (1,16)")
    parser.add_argument("--hidden-size", type=positive_int, default=256, help="of every model (256)")
    parser.add_argument("--layers", type=positive_int, default=2, help="of every model (2)")
    parser.add_argument("--heads", type=positive_int, default=4, help="of every model (4)")
    parser.add_argument("--repeats", type=positive_int, default=20, help="rounds over all mixers per point (20)")
    parser.add_argument("--seconds", type=number(0), default=10.0, help="stop a point's rounds after this long (10)")
    parser.add_argument(
        "--weights",
        type=names,
        nargs="?",
        const="bf16,int8,int4",
        metavar="FORMATS",
        help="instead: one model (--model) in float32 and with packed weights (bf16,int8,int4)",
    )
    parser.add_argument("--model", default="mdn_400M", help="the config for --weights (mdn_400M)")
    parser.add_argument("--no-llama", action="store_true", help="with --weights: without llama.cpp as a peer")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if args.weights is not None:
        _run_weights(args)
        return
    from mdn.bench.decoding import DecodingSize, bench, draw, tables
    from mdn.common.results import write_results
    from mdn.layers import MIXERS

    mixers = list(MIXERS) if args.mixers == ["all"] else args.mixers
    unknown = [name for name in mixers if name not in MIXERS]
    if unknown:
        raise ValueError(f"--mixers has unknown names {unknown}; expected some of {sorted(MIXERS)}")
    if args.hidden_size % args.heads:
        raise ValueError(f"--hidden-size must be a multiple of --heads, got {args.hidden_size} and {args.heads}")
    size = DecodingSize(args.hidden_size, args.layers, args.heads)
    content = bench(mixers, sorted(args.contexts), sorted(args.batches), size, args.repeats, args.seconds)
    print(*tables(content), sep="\n\n")
    facts = content["machine"]
    print(
        f"\n{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}, load {facts['load_before']:.1f}"
    )
    write_results(args.json, "decode", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)


def _run_weights(args: argparse.Namespace) -> None:
    formats = args.weights if isinstance(args.weights, list) else names(args.weights)
    unknown = [name for name in formats if name not in WEIGHT_FORMATS]
    if unknown:
        raise ValueError(f"--weights has unknown formats {unknown}; expected some of {list(WEIGHT_FORMATS)}")
    if args.plot is not None:
        raise ValueError("--plot cannot be combined with --weights: its result is a table")
    from mdn.bench.decoding_weights import bench, tables
    from mdn.bench.llama_peer import why_no_llama
    from mdn.common.results import write_results
    from mdn.models.info import load_config

    missing = "--no-llama was given" if args.no_llama else why_no_llama()
    config = load_config(args.model)
    content = bench(config, formats, sorted(args.batches), args.repeats, args.seconds, llama=missing is None)
    print(*tables(content), sep="\n\n")
    if missing is not None:
        print(f"\nllama.cpp was not measured: {missing}")
    facts = content["machine"]
    print(f"\n{facts['processor']}, {facts['threads']} threads, load {facts['load_before']:.1f}")
    write_results(args.json, "decode_weights", content)

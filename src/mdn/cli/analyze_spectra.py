"""`mdn analyze spectra`: where the eigenvalues of a step lie, for gate regions and for a trained model."""

from __future__ import annotations

import argparse

from mdn.cli.options import add_model_arguments, add_output_arguments, positive_int, records_of, seed

HELP = "eigenvalues of one step: the paper's regions, and a trained model's own gates on a text"
EXAMPLE = "mdn analyze spectra --model runs/demo --text README.md --plot spectra.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--points", type=positive_int, default=4000, help="gates drawn per region (4000)")
    parser.add_argument("--seed", type=seed, default=0, help="of the draws (0)")
    add_model_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from mdn.analysis.spectra import draw, spectra, tables
    from mdn.common.results import write_results

    content = spectra(args.points, args.seed, records_of(args))
    print(*tables(content), sep="\n\n")
    check = content["closed form against numpy.linalg.eigvals"]
    print(
        f"\nclosed form against numpy.linalg.eigvals of the full transition: largest distance "
        f"{check['largest distance']:.1e} over {check['samples']} random steps"
    )
    write_results(args.json, "spectra", content)
    if args.plot is not None:
        from mdn.common.plots import save_figure

        save_figure(draw(content), args.plot)

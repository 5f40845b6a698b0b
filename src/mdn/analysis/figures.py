"""Every figure of the docs, drawn again from the recorded results beside them: `python -m mdn.analysis.figures`.

docs/experiments/data/NAME.json becomes docs/figures/NAME.png and NAME.svg, labelled with the command that measured the
results. Results are measured by that command (with `--json`), not here: experiments take hours, figures seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mdn.analysis.kinds import draw_result
from mdn.common.plots import save_figure
from mdn.common.results import read_results

DATA, FIGURES = Path("docs/experiments/data"), Path("docs/figures")


def draw_file(path: Path, figures: Path) -> list[Path]:
    """The figure of one result file, as PNG and SVG."""
    content = read_results(path)
    return save_figure(draw_result(content), figures / f"{path.stem}.png", content["command"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn.analysis.figures", description="draw the figures of the docs")
    parser.add_argument("--data", type=Path, default=DATA, help=f"result files ({DATA})")
    parser.add_argument("--figures", type=Path, default=FIGURES, help=f"where figures go ({FIGURES})")
    args = parser.parse_args(arguments)
    files = sorted(args.data.glob("*.json"))
    if not files:
        print(f"no result files in {args.data}", file=sys.stderr)
        return 2
    for path in files:
        print(*draw_file(path, args.figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every figure and table of the experiment pages, from the recorded results: `python -m mdn.analysis.figures`.

docs/experiments/data/NAME.json becomes docs/figures/NAME.png and NAME.svg, labelled with the command that measured the
results. In the pages of docs/experiments the text between

    <!-- table NAME -->
    <!-- end -->

becomes the tables of NAME.json; `<!-- table NAME 2 -->` is the second of them alone. Results are measured by their
command (with `--json`), not here: experiments take hours, figures seconds.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from mdn.analysis.kinds import draw_result, tables_of
from mdn.common.files import write_atomically
from mdn.common.plots import save_figure
from mdn.common.results import Table, fill_page, read_results

DATA, FIGURES, PAGES = Path("docs/experiments/data"), Path("docs/figures"), Path("docs/experiments")
PLACE = re.compile(r"<!-- table ((\w+)(?: (\d+))?) -->")


def draw_file(path: Path, figures: Path) -> list[Path]:
    """The figure of one result file, as PNG and SVG."""
    content = read_results(path)
    return save_figure(draw_result(content), figures / f"{path.stem}.png", content["command"])


def with_tables(page: str, data: Path) -> str:
    """The page with its tables as the recorded results have them."""
    found = {}
    for place, name, number in PLACE.findall(page):
        tables = tables_of(read_results(data / f"{name}.json"))
        if number and not 1 <= int(number) <= len(tables):
            raise ValueError(f"<!-- table {place} -->: {name}.json has {len(tables)} tables")
        shown = [tables[int(number) - 1]] if number else tables
        found[place] = "\n" + "\n\n".join(map(_markdown, shown)) + "\n"
    return fill_page(page, found)


def _markdown(table: Table) -> str:
    caption = f"**{table.caption}**\n\n" if table.caption else ""
    return f"{caption}{Table('', table.header, table.rows)}"


def main(arguments: list[str] | None = None) -> int:
    description = "draw the figures of the docs and fill in the tables of the experiment pages"
    parser = argparse.ArgumentParser(prog="python -m mdn.analysis.figures", description=description)
    parser.add_argument("--data", type=Path, default=DATA, help=f"result files ({DATA})")
    parser.add_argument("--figures", type=Path, default=FIGURES, help=f"where figures go ({FIGURES})")
    parser.add_argument("--pages", type=Path, default=PAGES, help=f"the folder of pages with tables ({PAGES})")
    args = parser.parse_args(arguments)
    files = sorted(args.data.glob("*.json"))
    if not files:
        print(f"no result files in {args.data}", file=sys.stderr)
        return 2
    for path in files:
        print(*draw_file(path, args.figures))
    for page in sorted(args.pages.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if before != with_tables(before, args.data):
            write_atomically(page, with_tables(before, args.data).encode())
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The results of `mdn bench op` as tables, and the figure of time per token against T.

    python -m mdn.bench.op_results benchmarks/results/op_general.json benchmarks/README.md

rewrites the tables of `mdn bench op --general` in the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mdn.bench import op_general
from mdn.common.results import Table, fill_page, read_results

CONTROL = "matrix product (control)"
"""scales with threads wherever a second core is free"""
SCALES = 1.5
"""a matrix product that gains less from a second thread had no second core"""


def tables(content: dict[str, Any]) -> list[Table]:
    """Everything that was measured; with ``--accuracy`` only the errors, with ``--general`` only the general rule."""
    if "general" in content:
        general = content["general"]
        return [op_general.table(general), *([_bars(general["bars"])] if general["bars"] else [])]
    if "shapes" not in content:
        return [_accuracy(content["accuracy"])]
    return [
        *map(_shape, content["shapes"]),
        _lengths(content["lengths"]),
        _packing(content["packing"]),
        *([_scaling(content["scaling"])] if content["scaling"] else []),
        *([_decode(content["decode"])] if content["decode"] is not None else []),
        _saved(content["saved_bytes_per_token_and_head"]),
        _accuracy(content["accuracy"]),
        *([_bars(content["bars"])] if content["bars"] else []),
    ]


def remarks(content: dict[str, Any]) -> Iterator[str]:
    """The machine, and which peers could not run."""
    about = content["machine"]
    where = about.get("gpu") or f"{about['processor']}, {about['threads']} threads"
    yield f"{where}, torch {about['torch']}, {_precision(content)}, forward + backward"
    for name, reason in content["not_runnable"].items():
        yield f"not runnable here: {name}: {reason}"


def _precision(content: dict[str, Any]) -> str:
    """A peer with vectors in bfloat16 has that in its name."""
    return "float32" + " unless a peer says bfloat16" * any("bfloat16" in name for name in content["lengths"])


def too_busy(scaling: dict[str, float]) -> bool:
    """Whether the control had no second core, so that nothing can be said about threads."""
    return scaling.get(CONTROL, SCALES) < SCALES


def _shape(result: dict[str, Any]) -> Table:
    rows = []
    for name, seconds in result["seconds"].items():
        share = result["share_of_matmul_rate"].get(name)
        ratio = f"{result['times_faster_torch'][name]:.2f}"
        rows.append([name, f"{seconds * 1e3:.1f}", ratio, f"{share:.2f}" if share else ""])
    rate = f"{result['gflop']:.1f} GFLOP, matmul at {result['matmul_gflop_per_second']:.0f} GFLOP/s"
    header = ["peer", "ms", "times the torch backend's", "share of matmul rate"]
    return Table(f"{result['shape']} ({rate})", header, rows)


def _lengths(lengths: dict[str, dict[Any, float]]) -> Table:
    times = sorted({int(time) for row in lengths.values() for time in row})
    rows = []
    for name, row in lengths.items():
        mine = {int(time): value for time, value in row.items()}  # a JSON file has words for keys
        rows.append([name, *(f"{mine[time]:.1f}" if time in mine else "–" for time in times)])
    return Table("microseconds per token against T", ["peer", *(f"{time:,}" for time in times)], rows)


def _packing(packs: list[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{row['peer']}, {row['pack']}",
            f"{row['sequences']}",
            f"{row['tokens']:,}",
            *(f"{row[layout] * 1e3:.1f}" for layout in ("packed", "padded", "one sequence")),
            f"{row['packed'] / row['padded']:.2f}",
        ]
        for row in packs
    ]
    header = ["pack", "sequences", "tokens", "packed ms", "padded to chunks ms", "one sequence ms", "packed / padded"]
    return Table("many sequences in one row", header, rows)


def _scaling(scaling: dict[str, float]) -> Table:
    caption = "from one thread to two"
    if too_busy(scaling):
        caption += " (means nothing in this run: the machine is too busy, even a matrix product does not gain from it)"
    return Table(caption, ["peer", "times faster"], [[name, f"{ratio:.2f}"] for name, ratio in scaling.items()])


def _decode(decode: dict[str, Any]) -> Table:
    rows = []
    for row in decode["rows"]:
        least = row["seconds"]["scale both states"]
        rows += [
            [f"batch {row['batch']}, {name}", f"{seconds * 1e6:.0f}", f"{seconds / least:.2f}"]
            for name, seconds in row["seconds"].items()
        ]
    return Table(f"one decode step, {decode['shape']}", ["", "microseconds", "over scaling both states"], rows)


def _saved(saved: dict[str, float]) -> Table:
    rows = [[name, f"{size:,.0f}"] for name, size in saved.items()]
    return Table("kept for the backward pass", ["peer", "bytes per token and head"], rows)


def _accuracy(errors: list[dict[str, float]]) -> Table:
    names = [name for name in errors[0] if name != "log_mu"]
    rows = [[f"{row['log_mu']:g}", *(f"{row[name]:.1e}" for name in names)] for row in errors]
    caption = "relative error of the output in float32 against the float64 recurrence, for a constant log_mu"
    return Table(caption, ["log_mu", *names], rows)


def _bars(bars: list[dict[str, Any]]) -> Table:
    words = {True: "yes", False: "NO", None: "not judged"}
    rows = [[row["what"], f"{row['measured']:.2f}", row["bar"], words[row["met"]]] for row in bars]
    return Table("bars", ["", "measured", "bar", "met"], rows)


def draw(content: dict[str, Any]) -> Any:
    """Time per token against T."""
    from mdn.common.plots import doubling_axis, figure, legend_outside, plain_log_axis

    title = f"Forward + backward, {_precision(content)}"
    fig, axis = figure(title=title, x="T", y="microseconds per token", size=(8.2, 4.0))
    for name, row in content["lengths"].items():
        if row:
            points = sorted((int(time), value) for time, value in row.items())
            axis.plot(*zip(*points), marker="o", label=name)
    times = sorted({int(time) for row in content["lengths"].values() for time in row})
    doubling_axis(axis, times)
    plain_log_axis(axis)
    legend_outside(fig, axis)
    return fig


def fill_general(page: str, content: dict[str, Any]) -> str:
    """The page with the tables of a record of `mdn bench op --general`."""
    about = content["general"]["machine"]
    machine = f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, {about['date']}"
    shown = [f"{machine}, load {about['load_before']:.1f} before the run", *map(str, tables(content))]
    return fill_page(page, {"general": "\n\n".join(shown)})


if __name__ == "__main__":
    record, page_file = map(Path, sys.argv[1:])
    page_file.write_text(fill_general(page_file.read_text(), read_results(record, "op")))

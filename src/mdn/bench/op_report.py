"""The results of `mdn bench op` as text tables and as a plot of time per token against T."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns wide enough for their entries, the first flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def accuracy_text(rows: list[dict[str, float]]) -> str:
    names = [name for name in rows[0] if name != "log_mu"]
    title = "Relative error of the output in float32 against the float64 recurrence, for a constant log_mu\n"
    cells = [[f"{row['log_mu']:g}", *(f"{row[name]:.1e}" for name in names)] for row in rows]
    return title + table(["log_mu", *names], cells)


def report(results: dict[str, Any]) -> str:
    """Everything that was measured, as the terminal shows it."""
    about = results["machine"]
    parts = [f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, float32, forward + backward"]
    parts += [f"not runnable here: {name}: {reason}" for name, reason in results["not_runnable"].items()]
    parts += [_shape_text(row) for row in results["shapes"]]
    parts += [_lengths_text(results["lengths"]), _packing_text(results["packing"])]
    scaling = [[name, f"{ratio:.2f}"] for name, ratio in results["scaling"].items()]
    parts.append("From one thread to two\n" + table(["peer", "times faster"], scaling))
    if results["decode"] is not None:
        parts.append(_decode_text(results["decode"]))
    saved = results["saved_bytes_per_token_and_head"]
    rows = [[name, f"{size:,.0f}"] for name, size in saved.items()]
    parts.append("Kept for the backward pass\n" + table(["peer", "bytes per token and head"], rows))
    parts.append(accuracy_text(results["accuracy"]))
    if results["bars"]:
        cells = [
            [row["what"], f"{row['measured']:.2f}", row["bar"], "yes" if row["met"] else "NO"]
            for row in results["bars"]
        ]
        parts.append("Bars\n" + table(["", "measured", "bar", "met"], cells))
    return "\n\n".join(parts)


def _shape_text(result: dict[str, Any]) -> str:
    rows = []
    for name, seconds in result["seconds"].items():
        share = result["share_of_matmul_rate"].get(name)
        ratio = f"{result['times_faster_torch'][name]:.2f}"
        rows.append([name, f"{seconds * 1e3:.1f}", ratio, f"{share:.2f}" if share else ""])
    rate = f"{result['gflop']:.1f} GFLOP, matmul at {result['matmul_gflop_per_second']:.0f} GFLOP/s"
    header = ["peer", "ms", "times the torch backend's", "share of matmul rate"]
    return f"{result['shape']} ({rate})\n" + table(header, rows)


def _lengths_text(lengths: dict[str, dict[int, float]]) -> str:
    times = sorted({time for row in lengths.values() for time in row})
    cells = [[name, *(f"{row[t]:.1f}" if t in row else "-" for t in times)] for name, row in lengths.items()]
    return "Microseconds per token against T\n" + table(["peer", *map(str, times)], cells)


def _packing_text(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            f"{row['peer']}, {row['pack']}",
            str(row["sequences"]),
            str(row["tokens"]),
            *(f"{row[layout] * 1e3:.1f}" for layout in ("packed", "padded", "one sequence")),
            f"{row['packed'] / row['padded']:.2f}",
        ]
        for row in rows
    ]
    header = ["pack", "sequences", "tokens", "packed ms", "padded to chunks ms", "one sequence ms", "packed / padded"]
    return "Many sequences in one row\n" + table(header, cells)


def _decode_text(decode: dict[str, Any]) -> str:
    cells = []
    for row in decode["rows"]:
        least = row["seconds"]["scale both states"]
        cells += [
            [f"batch {row['batch']}, {name}", f"{seconds * 1e6:.0f}", f"{seconds / least:.2f}"]
            for name, seconds in row["seconds"].items()
        ]
    return f"One decode step, {decode['shape']}\n" + table(["", "microseconds", "over scaling both states"], cells)


def plot(results: dict[str, Any], path: Path) -> list[Path]:
    """Time per token against T, as PNG and SVG."""
    from mdn.common.plots import figure, save_figure

    fig, axis = figure(title="Forward + backward, float32", x="T", y="microseconds per token")
    for name, row in results["lengths"].items():
        if row:
            times = sorted(row)
            axis.plot(times, [row[time] for time in times], marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.legend(fontsize=8)
    return save_figure(fig, path)

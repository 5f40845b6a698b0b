"""The tables of the pages about the kernels, from a report of `mdn bench kernels --variants ... --json FILE`.

    python -m mdn.bench.kernel_tables benchmarks/results/kernels.json docs/kernels.md docs/kernel-tables.md

rewrites the text between `<!-- table NAME -->` and `<!-- end -->` in the pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mdn.bench.kernel_bars import COUNT_BARS, ESTIMATE_BARS, WAVEFRONT_BAR
from mdn.bench.kernel_report import COUNTED, OPS, total_counts, total_ms
from mdn.common.results import fill_page


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def traffic(report: dict[str, Any]) -> str:
    """Bytes written per token and head, by kernel and buffer, for each K."""
    by_width = report["bytes_written_by_kernel"]
    rows = []
    for which in ("forward", "backward", "decode"):
        for kernel in next(iter(by_width.values()))[which]:
            cells = [list_buffers(passes[which][kernel]) for passes in by_width.values()]
            rows.append([f"`{kernel}`", which, *cells])
    for which in ("forward", "backward"):
        totals = [f"**{report['bytes_written_per_token_head'][width][which]:,.0f}**" for width in by_width]
        rows.append([f"**{which}, {report['launches'][which]} launches**", "", *totals])
    return table(["kernel", "pass", *(width.replace("K", "K=") for width in by_width)], rows)


def list_buffers(written: dict[str, float]) -> str:
    """What is written once per sequence (the final state) counts as zero per token and is left out."""
    sizes = {name: f"{size:.1f}" if size < 1 else f"{size:,.0f}" for name, size in written.items() if size}
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def resources(report: dict[str, Any], key_dim: int) -> str:
    """Registers / spilled bytes / shared bytes / instructions of every launch on every target."""
    rows = [row for row in report["kernels"] if row["K"] == key_dim]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        text = f"{row['registers']} / {row['spill_bytes']} / {row['shared_bytes']:,} / {row['instructions']:,}"
        cells.setdefault((row["name"], row["pass"]), {})[row["target"]] = text
    lines = [[f"`{name}`", which, *(found[target] for target in targets)] for (name, which), found in cells.items()]
    return table(["kernel", "pass", *targets], lines)


def variants(report: dict[str, Any]) -> str:
    """For every other kind of input: launches compiled, the largest spill and the largest shared memory."""
    rows = report.get("variants", [])
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        line = [name]
        for target in targets:
            mine = [row for row in rows if (row["variant"], row["target"]) == (name, target)]
            if not mine:
                line.append("-")
                continue
            worst = max(mine, key=lambda row: row["spill_bytes"])
            spills = f"{worst['spill_bytes']:,} (`{worst['name']}`)" if worst["spill_bytes"] else "0"
            line.append(f"{len(mine)} / {spills} / {max(row['shared_bytes'] for row in mine):,}")
        lines.append(line)
    return table(["inputs", *targets], lines)


def estimate(report: dict[str, Any]) -> str:
    """Estimated milliseconds, and ours over the others'."""
    rows = []
    for (target, size), times in total_ms(report["estimates"]).items():
        ratios = [f"{times['mdn'] / times[other]:.2f}" for other in ("gdn", "kda")]
        rows.append([target, size, *(f"{times[name]:.2f}" for name in OPS), *ratios])
    return table(["GPU", "size", "MDN", "GDN", "KDA", "MDN / GDN", "MDN / KDA"], rows)


def calibration(report: dict[str, Any]) -> str:
    """Published milliseconds, estimated ones, and their ratio."""
    rows = [
        [f"{row['op'].upper()}, forward", *(f"{row[name]:.2f}" for name in ("published_ms", "estimated_ms", "factor"))]
        for row in report["calibration"]
    ]
    return table(["FLA's kernels on an H20", "published ms", "estimated ms", "published / estimated"], rows)


def launches(report: dict[str, Any]) -> str:
    """What each launch takes by the estimate, ours and FLA's, on sm_90."""
    rows = []
    for row in report["estimates"]:
        if row["target"] == "sm_90":
            figures = [f"{row[name]:,}" for name in ("programs", "cycles", "blocks_per_sm", "barriers")]
            rows.append(
                [row["op"].upper(), row["heads"], f"`{row['name']}`", *figures, row["bound"], f"{row['ms']:.2f}"]
            )
    return table(["op", "size", "kernel", "programs", "cycles", "blocks / SM", "barriers", "bound", "ms"], rows)


def counts(report: dict[str, Any]) -> str:
    """What was executed per token and head: ours by kernel, the others' sums."""
    return _counts(report["executed"])


def counts_large(report: dict[str, Any]) -> str:
    """The same of ours with the widths of the paper's larger model."""
    return _counts(report.get("executed_large", []))


def _counts(executed: list[dict[str, Any]]) -> str:
    rows = []
    for key, sums in total_counts(executed).items():
        target, op, which = key
        if op == "mdn":
            mine = [row for row in executed if (row["target"], row["op"], row["pass"]) == key]
            rows += [[target, f"`{row['name']}`", *(_count(row[figure]) for figure in COUNTED)] for row in mine]
        rows.append([target, f"**{op.upper()}, {which}**", *(f"**{_count(sums[figure])}**" for figure in COUNTED)])
    return table(["GPU", "kernel", *(name.replace("_", " ") for name in COUNTED)], rows)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def timeline(report: dict[str, Any]) -> str:
    """Cycles / blocks per SM / barriers / copies in flight of every launch, for each width and target."""
    rows = [row for row in report["kernels"] if "cycles" in row]
    places = list(dict.fromkeys((row["target"], row["K"]) for row in rows))
    cells: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in rows:
        text = f"{row['cycles']:,} / {row['blocks_per_sm']} / {row['barriers']} / {row['copies_in_flight']}"
        cells.setdefault((row["name"], row["pass"]), {})[row["target"], row["K"]] = text
    lines = [[f"`{name}`", which, *(found[place] for place in places)] for (name, which), found in cells.items()]
    return table(["kernel", "pass", *(f"{target}, K={width}" for target, width in places)], lines)


BEFORE_ESTIMATE = {
    "H=6 K=128 V=256": "4.7 ms: 2.3 times GDN, 1.6 times KDA",
    "H=6 K=256 V=512": "11.9 ms: 2.0 times GDN, 2.0 times KDA",
}
BEFORE_INSTRUCTIONS = {"forward": "1,393", "backward": "3,660"}
BEFORE_WAVEFRONTS = "2.4 in `prepare`, 2.1 in `backward_gates`"
BEFORE_CYCLES = {
    "prepare": "44,700 (341 barriers)",
    "forward_states": "3,174 and a wait for all loads, for half as many columns",
    "backward_scores": "26,200",
    "backward_inputs": "84,500",
    "backward_gates": "24,400",
}


def before_and_after(report: dict[str, Any]) -> str:
    """What the kernels' first design gave, what the report says now, and the bar."""
    rows = []
    estimated = total_ms(report["estimates"])
    for size, before in BEFORE_ESTIMATE.items():
        ms = estimated["sm_90", size]
        ratios = ", ".join(f"{ms['mdn'] / ms[op]:.2f} times {op.upper()}" for op in ("gdn", "kda"))
        bar = ", ".join(f"{factor} times {op.upper()}" for op, factor in ESTIMATE_BARS[size].items())
        rows.append([f"estimate on sm_90, {size}", before, f"{ms['mdn']:.1f} ms: {ratios}", bar])
    sums = total_counts(report["executed"])
    for which, before in BEFORE_INSTRUCTIONS.items():
        now = f"{sums['sm_80', 'mdn', which]['warp_instructions']:,.0f}"
        rows.append([f"warp instructions per token and head, {which}, sm_80", before, now, f"{COUNT_BARS[which]:,}"])
    ours = [row for row in (*report["executed"], *report.get("executed_large", ())) if row["op"] == "mdn"]
    worst = max(ours, key=lambda row: row["wavefronts"] / row["wavefronts_ideal"])
    now = f"at most {worst['wavefronts'] / worst['wavefronts_ideal']:.2f} (`{worst['name']}`, {worst['target']})"
    bar = f"{WAVEFRONT_BAR} in every kernel"
    rows.append(["wavefronts over those without bank conflicts", BEFORE_WAVEFRONTS, now, bar])
    for name, before in BEFORE_CYCLES.items():
        row = next(row for row in report["kernels"] if (row["name"], row["target"], row["K"]) == (name, "sm_90", 128))
        rows.append([f"static cycles of `{name}`, sm_90, K=128", before, f"{row['cycles']:,}", ""])
    return table(["figure", "before", "now", "bar"], rows)


def tables_of(report: dict[str, Any]) -> dict[str, str]:
    """All tables by name."""
    return {
        "estimate": estimate(report),
        "calibration": calibration(report),
        "launches": launches(report),
        "counts": counts(report),
        "counts-large": counts_large(report),
        "timeline": timeline(report),
        "before-and-after": before_and_after(report),
        "traffic": traffic(report),
        "resources-128": resources(report, 128),
        "resources-256": resources(report, 256),
        "variants": variants(report),
    }


def fill(page: str, report: dict[str, Any]) -> str:
    """The page with the tables that it has places for."""
    tables = tables_of(report)
    return fill_page(page, {name: tables[name] for name in re.findall(r"<!-- table ([\w-]+) -->", page)})


if __name__ == "__main__":
    report_file, *pages = map(Path, sys.argv[1:])
    for page_file in pages:
        page_file.write_text(fill(page_file.read_text(), json.loads(report_file.read_text())))

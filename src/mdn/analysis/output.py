"""What the analysis commands share: the options for results and figures, and how results are written."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from mdn.plots import command_line
from mdn.training.files import write_atomically


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the figure to FILE, as PNG and SVG")


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words. Tuples and NumPy numbers become plain ones."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def write_results(path: Path | None, kind: str, results: dict[str, Any], command: str | None = None) -> None:
    """One JSON file that says what it is (``kind``: the report page looks for it) and which command made it."""
    if path is None:
        return
    content = plain({"kind": kind, "command": command or command_line(), **results})
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())  # a line per entry
    write_atomically(path, ("{" + ",\n".join(lines) + "}\n").encode())


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])

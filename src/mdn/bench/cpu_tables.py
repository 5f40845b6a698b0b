"""The tables of docs/cpu-inference.md, from the recorded results: ``python -m mdn.bench.cpu_tables``.

Rewrites the text between ``<!-- table NAME -->`` and ``<!-- end -->`` in the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mdn.bench import decoding_weights, training_step, weight_quality
from mdn.common.results import Table, fill_page, read_results

PAGE, RESULTS = Path("docs/cpu-inference.md"), Path("benchmarks/results")


def fill(page: str, results: Path) -> str:
    """The page with its tables from the files in ``results``."""
    decode = read_results(results / "decode_weights.json", "decode_weights")
    quality = read_results(results / "weight_quality.json", "weight_quality")
    train = read_results(results / "train_512.json", "train")
    tables = {
        "decode": recorded(decoding_weights.tables(decode), decode),
        "quality": str(weight_quality.table(quality["models"])),
        "training": recorded(training_step.tables(train)[1:], train),
    }
    return fill_page(page, {name: sentences(text) for name, text in tables.items()})


def recorded(tables: list[Table], content: dict[str, Any]) -> str:
    """The tables and what they were measured on."""
    machine = content["machine"]
    day, where = machine["date"].split()[0], f"{machine['processor']}, {machine['threads']} threads"
    return "\n\n".join([*map(str, tables), f"recorded on {day}: {where}, torch {machine['torch']}"])


def sentences(text: str) -> str:
    """Captions and other lines that are not part of a table, as sentences."""
    lines = text.splitlines()
    return "\n".join(line if line.startswith("|") or not line else f"{line[0].upper()}{line[1:]}." for line in lines)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(), RESULTS))

"""metrics.jsonl: one JSON object per line, each with its `step`. A resumed run continues it as if never interrupted.

{"step": 1, "loss": 8.31, "grad_norm": 2.4, "learning_rate": 1e-4, "tokens": 4096}        every step
{"step": 50, "gates": [{"layer": 0, "alpha": 0.61, ...}, ...]}                            every gates_every steps
{"step": 400, "held_out": {"loss": ..., "perplexity": ..., "bits_per_byte": ...}}         evaluations
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mdn.common.files import write_atomically


class MetricsLog:
    """Appends lines; `resume_at(step)` first drops what came after the checkpoint that training goes on from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume_at(self, step: int) -> None:
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def write(self, *lines: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines))

    def write_once(self, line: dict[str, Any]) -> None:
        """Append the line unless one with the same step and keys is there (a run killed after its last evaluation)."""
        if not any(old["step"] == line["step"] and old.keys() == line.keys() for old in read_metrics(self.path)):
            self.write(line)


def _plain(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may have been cut by a kill and is then left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines

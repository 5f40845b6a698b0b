"""What run folders hold: training runs, result files and figures. A file is used or listed as unused.

A training run is a folder with metrics.jsonl. A result file is JSON with a ``kind`` (this package's analyses and
benchmarks), or one of the known shapes of `mdn mqar` and `mdn eval`. Figures are PNG files; their command is in them.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mdn.training.monitor import read_metrics

LARGEST_RESULT = 20_000_000
# Parts of a model or a checkpoint: not results.
_NOT_RESULTS = {"config", "generation_config", "tokenizer", "tokenizer_config", "special_tokens_map", "trainer_state"}
_NOT_FOLLOWED = {"tensorboard", "cells", "model"}


@dataclass(frozen=True)
class TrainingRun:
    name: str
    steps: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    summary: dict[str, Any] | None


@dataclass(frozen=True)
class ResultFile:
    path: Path
    kind: str
    content: dict[str, Any]


@dataclass
class Found:
    runs: list[TrainingRun] = field(default_factory=list)
    results: list[ResultFile] = field(default_factory=list)
    figures: list[tuple[Path, str]] = field(default_factory=list)
    """path and the command that made it"""
    unused: list[str] = field(default_factory=list)
    """files that could not be used, with the reason"""


def collect(folders: list[Path]) -> Found:
    """Everything in the folders (or named files), in the order of their names."""
    found = Found()
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"no run folder {folder}: expected a folder (or a result file) of an earlier command")
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            if path.is_file() and not _inside_a_part(path.relative_to(folder).parts[:-1]):
                _add(found, path, path.parent.relative_to(folder.parent) if folder.is_dir() else path.parent)
    if not (found.runs or found.results or found.figures):
        raise ValueError(f"nothing to report in {', '.join(map(str, folders))}: no metrics.jsonl, result or figure")
    return found


def _inside_a_part(parts: tuple[str, ...]) -> bool:
    return any(part in _NOT_FOLLOWED or part.startswith(("checkpoint", ".")) for part in parts)


def _add(found: Found, path: Path, shown: Path) -> None:
    if path.name == "metrics.jsonl":
        found.runs.append(_training_run(path.parent, str(shown)))
    elif path.suffix == ".png":
        found.figures.append((path, png_command(path)))
    elif path.suffix == ".json" and path.stem not in _NOT_RESULTS and path.name != "summary.json":
        _add_result(found, path)


def _training_run(directory: Path, name: str) -> TrainingRun:
    lines = read_metrics(directory / "metrics.jsonl")
    summary = directory / "summary.json"
    return TrainingRun(
        name=name,
        steps=[line for line in lines if isinstance(line.get("loss"), int | float)],
        held_out=[line for line in lines if "held_out" in line],
        summary=json.loads(summary.read_text()) if summary.is_file() else None,
    )


def _add_result(found: Found, path: Path) -> None:
    if path.stat().st_size > LARGEST_RESULT:
        found.unused.append(f"{path}: larger than {LARGEST_RESULT:,} bytes")
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found.unused.append(f"{path}: not JSON")
        return
    kind = _kind(content)
    if kind is None:
        found.unused.append(f"{path}: not a result file that this page knows")
    else:
        found.results.append(ResultFile(path, kind, content))


def _kind(content: Any) -> str | None:
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("kind"), str):
        return content["kind"]
    if "chosen" in content and "recipe" in content:
        return "mqar"
    if "row" in content and "arithmetic" in content:
        return "ablation cell"
    if isinstance(content.get("cell"), dict) and "stepwise" in content:
        return "causality cell"
    if isinstance(content.get("rows"), list) and content["rows"] and isinstance(content["rows"][0], dict):
        return "benchmark"
    return "evaluation" if "table" in content else None


def png_command(path: Path) -> str:
    """The Description that ``save_figure`` writes into its PNG files, or ''. Reads tEXt chunks only."""
    data = path.read_bytes()
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        return ""
    position = 8
    while position + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        if kind == b"tEXt" and body.startswith(b"Description\0"):
            return body.split(b"\0", 1)[1].decode("latin-1")
        position += 12 + length
    return ""

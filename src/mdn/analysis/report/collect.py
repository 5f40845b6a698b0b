"""What run folders hold: training runs, result files and figures. A file is used or listed as unused with the reason.

A training run is a folder with metrics.jsonl. A result file is JSON with a ``kind``. Figures are PNG files; the command
that made them is in them.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mdn.analysis.kinds import tables_of
from mdn.common.results import Table, read_results
from mdn.training.monitor import read_metrics

LARGEST_RESULT = 20_000_000
# Parts of a model or a checkpoint: not results.
_NOT_RESULTS = {"config", "generation_config", "tokenizer", "tokenizer_config", "special_tokens_map", "trainer_state"}
_NOT_FOLLOWED = {"tensorboard", "cells", "model", "models"}


@dataclass(frozen=True)
class TrainingRun:
    name: str
    steps: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    gates: list[dict[str, float]]
    """the last means of the gates, by layer; empty for a mixer without them"""
    summary: dict[str, Any]
    """empty for a run that has not finished"""


@dataclass(frozen=True)
class ResultFile:
    kind: str
    command: str
    tables: list[Table]


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
                name = path.parent.relative_to(folder.parent) if folder.is_dir() else path.parent
                try:
                    _add(found, path, str(name))
                except (ValueError, OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
                    reason = " ".join(str(error).split()).removeprefix(f"{path} is ")
                    found.unused.append(f"{path}: {reason}")
    if not (found.runs or found.results or found.figures):
        raise ValueError(f"nothing to report in {', '.join(map(str, folders))}: no metrics.jsonl, result or figure")
    return found


def _inside_a_part(parts: tuple[str, ...]) -> bool:
    return any(part in _NOT_FOLLOWED or part.startswith(("checkpoint", ".")) for part in parts)


def _add(found: Found, path: Path, run_name: str) -> None:
    if path.name == "metrics.jsonl":
        found.runs.append(_training_run(path.parent, run_name))
    elif path.suffix == ".png":
        found.figures.append((path, png_command(path)))
    elif path.suffix == ".json" and path.stem not in _NOT_RESULTS and path.name != "summary.json":
        if path.stat().st_size > LARGEST_RESULT:
            raise ValueError(f"larger than {LARGEST_RESULT // 2**20} MiB")
        content = read_results(path)
        command = content.get("command") or content.get("provenance", {}).get("command", "")
        found.results.append(ResultFile(content["kind"], command, tables_of(content)))


def _training_run(directory: Path, name: str) -> TrainingRun:
    lines = read_metrics(directory / "metrics.jsonl")
    summary = directory / "summary.json"
    measured = [line["gates"] for line in lines if line.get("gates")]
    names = ("alpha", "beta", "mu", "eta")  # and "direct" where there is one
    return TrainingRun(
        name=name,
        steps=[line for line in lines if isinstance(line.get("loss"), int | float)],
        held_out=[line for line in lines if "held_out" in line],
        gates=[entry for entry in measured[-1] if all(gate in entry for gate in names)] if measured else [],
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
    )


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

"""Result files: one JSON dialect, the Markdown table, and what a result says about its own origin.

write_results("spectra.json", "spectra", {"points": 4000})      # {"kind": "spectra", "command": "mdn analyze ...", ...}
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdn.common.files import read_json, write_atomically

if TYPE_CHECKING:
    import torch

PACKAGES = ("momentum-deltanet", "torch", "transformers", "tokenizers", "datasets", "lm_eval", "numpy")


def plain(value: Any) -> Any:
    """What JSON can hold: NaN and infinity become the words "nan", "inf" and "-inf"; NumPy and tuples become plain."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_results(path: Path | str | None, kind: str, results: dict[str, Any]) -> None:
    """One JSON file that says what it is (``kind``: the report page looks for it) and which command made it."""
    if path is None:
        return
    content = plain({"kind": kind, "command": command_line(), **results})
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())  # a line per entry
    write_atomically(Path(path), ("{" + ",\n".join(lines) + "}\n").encode())


def read_results(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The content of a file that ``write_results`` wrote, numbers that JSON cannot hold restored."""
    try:
        content = _numbers(read_json(path))
    except RecursionError:
        raise ValueError(f"{path} is not usable: its JSON is nested too deeply") from None
    found = content.get("kind")
    if not isinstance(found, str) or kind not in (None, found):
        raise ValueError(f"{path} is not a result file: kind must be {kind or 'given'!r}, got {found!r}")
    return content


def _numbers(value: Any) -> Any:
    """The words "nan", "inf" and "-inf" as numbers: the inverse of ``plain``."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, for the terminal, the docs and the report page."""

    caption: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        caption = f"{self.caption}\n\n" if self.caption else ""
        return caption + markdown_table(self.header, self.rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def fill_page(page: str, tables: dict[str, str]) -> str:
    """The page with each text of ``tables`` between `<!-- table NAME -->` and `<!-- end -->`."""
    for name, text in tables.items():
        place = re.search(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", page, re.DOTALL)
        if place is None:
            raise ValueError(f"the page has no place for a table: expected <!-- table {name} --> and <!-- end -->")
        page = page[: place.start()] + place[1] + text + "\n" + place[2] + page[place.end() :]
    return page


def command_line() -> str:
    """The command of this process, as a user would type it."""
    started = Path(sys.argv[0])
    name = started.parent.name if started.name == "__main__.py" else started.name or "python"  # python -m mdn
    return shlex.join([name, *sys.argv[1:]])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def provenance(seed: int | None) -> dict[str, Any]:
    import torch

    return {
        "command": command_line(),
        "seed": seed,
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def model_hash(model: torch.nn.Module, tokenizer: Any = None) -> str:
    """SHA-256 over the names, shapes, dtypes and bytes of all weights, the config, and the tokenizer's vocabulary."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    config = getattr(model, "config", None)
    if config is not None:
        # Where the model lies and which library saved it do not change what it computes.
        left_out = ("_name_or_path", "transformers_version", "mdn_version", "architectures", "dtype", "torch_dtype")
        fields = {name: value for name, value in config.to_dict().items() if name not in left_out}
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    if tokenizer is not None:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()

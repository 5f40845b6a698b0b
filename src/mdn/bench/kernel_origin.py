"""Where figures and reports about the kernels come from: the commit of the source, and the versions that matter."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("triton", "fla-core")
ASSEMBLED_FOR = {"ptxas": 90, "ptxas-blackwell": 100}
"""Triton's assemblers, and a GPU for which each is called"""


def source_commit() -> str | None:
    """The commit of the source that runs; None if it does not come from a checkout (an installed package may lie inside
    the repository of somebody else)."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changed = _git(here.parent, "diff", "--quiet", "HEAD", "--", str(here.parents[1])) is None
    return f"{commit}, with changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def compiler_versions() -> dict[str, str]:
    """Of Triton, its assemblers and FLA's kernels."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {name: get_ptxas(architecture).version for name, architecture in ASSEMBLED_FOR.items()}


def origin() -> dict[str, Any]:
    """The command, the date, the commit and all versions: the ``provenance`` of a report."""
    from mdn.common.results import provenance

    found = provenance(seed=None)
    return found | {"commit": source_commit(), "versions": found["versions"] | compiler_versions()}

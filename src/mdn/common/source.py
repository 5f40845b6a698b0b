"""Which commit of the source is running: for results and reports."""

from __future__ import annotations

import subprocess
from pathlib import Path


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

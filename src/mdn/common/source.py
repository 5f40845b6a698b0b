"""Which commit of the source is running: for results and reports."""

from __future__ import annotations

import subprocess
from pathlib import Path


def source_commit() -> str | None:
    """The commit of the source that runs; None if it does not come from a checkout (an installed package may lie inside
    the repository of somebody else)."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name)[0] != 0:
        return None
    failed, commit = _git(here.parent, "rev-parse", "HEAD")
    if failed:
        return None
    # 1 says that there are differences; whatever else is not 0 says nothing about them.
    changed = _git(here.parent, "diff", "--quiet", "HEAD", "--", str(here.parents[1]))[0] == 1
    return f"{commit}, with changes" if changed else commit


def _git(folder: Path, *arguments: str) -> tuple[int, str]:
    """Git's return code and output; -1 and nothing if git is missing or times out."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout.strip()

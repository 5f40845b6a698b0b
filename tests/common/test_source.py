"""The commit that results and reports name."""

import subprocess
from pathlib import Path

import pytest

from mdn.common import source


def test_the_commit_is_that_of_the_source_and_none_outside_of_a_checkout(monkeypatch, tmp_path):
    module = Path(source.__file__)
    head = subprocess.run(["git", "-C", module.parent, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert source.source_commit().startswith(head.stdout.strip())
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / "site-packages" / "mdn" / "common" / module.name
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(source, "__file__", str(installed))
    assert source.source_commit() is None


@pytest.mark.parametrize(
    ("outcome", "expected"), [(0, "abc"), (1, "abc, with changes"), (128, "abc"), (subprocess.TimeoutExpired, "abc")]
)
def test_only_differences_are_called_changes(outcome, expected, monkeypatch):
    """A comparison that fails or takes too long has found none."""

    def run(command, **options):
        if "diff" not in command:
            return subprocess.CompletedProcess(command, 0, stdout="abc\n")
        if outcome is subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, outcome, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert source.source_commit() == expected

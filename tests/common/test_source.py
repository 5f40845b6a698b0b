"""The commit that results and reports name."""

import subprocess
from pathlib import Path

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

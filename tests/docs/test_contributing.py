"""The walk-throughs of CONTRIBUTING.md, followed to the letter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_walk_through_works_as_printed(section, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    assert blocks, "a walk-through shows code"
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip(), "it shows that it worked"


def test_files_that_the_text_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src|tests|docs|examples)/[\w/.]+)`", text) + re.findall(r"\]\(([\w/.]+)\)", text)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []

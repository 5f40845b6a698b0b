"""The README is true: its Python runs, its links exist, and every `mdn` command in the docs parses."""

import re
import shlex
from pathlib import Path

import pytest

from mdn.cli import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_every_python_snippet_of_the_readme_runs(number):
    assert len(SNIPPETS) >= 3
    exec(compile(SNIPPETS[number], f"README.md snippet {number + 1}", "exec"), {"__name__": "__readme__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def documented_commands() -> list[tuple[str, str]]:
    """Whole command lines that start with `mdn`, in code spans and fenced blocks."""
    found = []
    for page in PAGES:
        text = page.read_text()
        fenced = "\n".join(re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, flags=re.DOTALL))
        lines = re.findall(r"^(?:\$ )?(mdn [^#\n\\]+)$", fenced, flags=re.MULTILINE)
        lines += re.findall(r"`(mdn [^`\n]+)`", text)
        found += [(str(page.relative_to(ROOT)), line.strip()) for line in lines]
    return found


def is_a_pattern(line: str) -> bool:
    """Lines with placeholders such as [..], {..}, <..> or an ellipsis describe a command rather than being one."""
    return bool(re.search(r"[\[\]{}<>|]|\.\.\.|…", line))


@pytest.mark.parametrize(("page", "line"), [c for c in documented_commands() if not is_a_pattern(c[1])])
def test_every_documented_command_is_accepted_by_the_parser(page, line):
    words = shlex.split(line)[1:]
    target = COMMANDS[words[0]]
    if isinstance(target, dict) and len(words) > 1:
        assert words[1] in target
    named_in_running_text = len(words) == (1 if isinstance(target, str) else 2) or len(words) == 1
    if not named_in_running_text:
        assert build_parser(words).parse_args(words).run is not None

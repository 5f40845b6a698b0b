"""What the documentation shows: its Python, its links and its commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
PROGRAMS = ("mdn", "python", "python3", "make", "torchrun", "pytest", "tests/sanitizers/run")


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    """without a comment at its end"""
    in_a_span: bool = False
    """in a sentence or a table; the others stand in a block of code, to be typed as they are"""

    @property
    def words(self) -> list[str]:
        return self.line.split()

    @property
    def is_a_name(self) -> bool:
        """`mdn report` in a sentence or a list of commands names the command."""
        return self.in_a_span and len(self.words) <= 3 and all(re.fullmatch("[a-z-]+", w) for w in self.words)

    @property
    def is_a_pattern(self) -> bool:
        """Lines with placeholders such as [..], FILE or an ellipsis describe commands rather than being one."""
        return bool(re.search(r"\[(?!\w+(,\w+)*\])|[{}<>|]|\.\.\.|…|(?<![\w=./])[A-Z]{3,}(?![\w.])", self.line))


def fenced_blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def python_blocks(page: str) -> list[str]:
    return [text for language, text in fenced_blocks(page) if language == "python"]


def relative_links(page: str) -> list[str]:
    return re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", PAGES[page])


def commands() -> list[Command]:
    """Every command of every page once, from fenced and indented blocks and from code spans."""
    found: dict[Command, None] = {}
    for page, text in PAGES.items():
        shell = [block for language, block in fenced_blocks(page) if language in ("", "bash", "sh", "console", "text")]
        rest = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        indented = re.findall(r"^ {4,}(\S.*)$", rest.replace("\\\n", " "), flags=re.MULTILINE)
        typed = [line for block in shell for line in block.replace("\\\n", " ").splitlines()] + indented
        spans = [
            span.replace("\n", " ") for paragraph in rest.split("\n\n") for span in re.findall("`([^`]+)`", paragraph)
        ]
        for line, in_a_span in (*((line, False) for line in typed), *((span, True) for span in spans)):
            line = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ")
            if line.split(" ")[0] in PROGRAMS and line not in PROGRAMS[:-1]:
                found[Command(page, re.sub(r"\s+", " ", line), in_a_span)] = None
    return list(found)

"""What a reader of the Markdown files may expect of their form."""

from pages import ROOT

FOLDERS = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md")
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))


def prose_lines(text: str):
    """Lines that an editor can wrap: no code, tables, headings or HTML."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith(("|", "#", "<", "    ", "[", "![")):
            yield number, line


def test_prose_is_as_wide_as_code():
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in prose_lines(page.read_text())
        if len(line) > 120
    ]
    assert long == []

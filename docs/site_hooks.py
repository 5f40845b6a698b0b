"""What the documentation site does differently from the repository: links that leave docs/ become plain text."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """`[text](../src/file.py)` works on a code host but not on the site. Pages in subfolders may use one `../`."""
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(r"\1", markdown)

"""docs/architecture.md: its table lists every package and what may import what, and the code keeps to it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "mdn"
OUTSIDE = {"torch", "transformers", "vllm", "matplotlib"}


def table() -> dict[str, set[str]]:
    """package or module -> packages that it may import; {"everything"} for any."""
    allowed = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`mdn/([\w.]+?)(?:\.py|/)?`", cells[0]) if len(cells) == 3 else ():
            allowed[name] = {word.split()[0] for word in cells[2].split(", ") if word} - OUTSIDE
    return allowed


def imports_of(path: Path) -> set[str]:
    """Packages of ours that a file imports when it is imported itself: not inside functions, not for types alone."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"mdn.{x.name}" for x in node.names] if node.module == "mdn" else [node.module]
        elif isinstance(node, ast.Import):
            names += [x.name for x in node.names]
    return {name.split(".")[1] for name in names if name.startswith("mdn.")}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


PACKAGES = sorted({package_of(path) for path in SOURCE.rglob("*.py")} - {"__init__", "__main__"})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_table_allows(package):
    allowed = table()
    assert package in allowed, f"docs/architecture.md does not list mdn/{package}"
    if "everything" in allowed[package]:
        return
    for path in SOURCE.rglob("*.py"):
        if package_of(path) == package:
            forbidden = imports_of(path) - allowed[package] - {package, "__version__"}
            assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"

"""docs/notation.md: its identifiers are those of minimal.py, the torch form, the C++ kernel and the Triton kernels."""

import re

import pytest

from pages import ROOT

OPS = ROOT / "src" / "mdn" / "ops"
IMPLEMENTATIONS = {
    "minimal.py": [ROOT / "src" / "mdn" / "minimal.py"],
    "torch": sorted((OPS / "momentum").glob("*.py")),
    "C++": sorted((OPS / "cpu" / "csrc").iterdir()),
    "Triton": sorted((OPS / "triton").glob("*.py")),
}
IN_ALL_OF_THEM = (
    *("q", "k", "v", "p", "alpha", "mu", "log_alpha", "log_mu", "beta", "eta", "S", "M"),
    *("residual", "target", "abar", "mbar", "b", "gamma_M", "gamma_S", "erase", "attend", "write_S", "write_M"),
)


def identifiers() -> set[str]:
    """Those of both tables; a row whose second cell has no code belongs to the table of words."""
    rows = [line.split("|") for line in (ROOT / "docs" / "notation.md").read_text().splitlines() if line[:1] == "|"]
    cells = [row[2] if len(row) == 6 else row[1] for row in rows if len(row) > 4]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def uses(implementation: str, name: str) -> bool:
    return any(re.search(rf"\b{name}\b", path.read_text()) for path in IMPLEMENTATIONS[implementation])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_quantities_of_the_rule_have_one_name_in_every_language(implementation):
    assert set(IN_ALL_OF_THEM) <= identifiers()
    assert [name for name in IN_ALL_OF_THEM if not uses(implementation, name)] == []


def test_the_table_has_no_name_that_nobody_uses():
    names = identifiers() - {"grad_x"}  # a pattern, not a name
    sources = [path.read_text() for path in OPS.rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    assert [name for name in sorted(names) if not any(re.search(rf"\b{name}\b", text) for text in sources)] == []

"""The pages are true: their Python runs as printed, one block after the other, and their links lead somewhere."""

from __future__ import annotations

import pytest
import torch

from mdn.layers import MIXERS, init
from pages import PAGES, ROOT, python_blocks, relative_links

ELSEWHERE = {"CONTRIBUTING.md": "test_contributing.py", "docs/serving.md": "tests/serving"}
WITH_PYTHON = [page for page in PAGES if python_blocks(page) and page not in ELSEWHERE]
ASSUMED = {"docs/ops.md": {"mask": torch.tensor([[0, 1, 1], [1, 1, 1]]), "x": torch.ones(2, 3, 5)}}
"""names that a page's blocks use without making them"""
PRINTED = {
    "docs/model.md": "torch.Size([1, 120, 64])",
    "docs/mixers.md": "ShortConvolution(32, width=6, bias=False, silu=True)",
}


@pytest.fixture
def run_blocks(tmp_path, monkeypatch):
    """Runs the blocks of a page in an empty folder; a mixer that they add is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "TABLE", [*init.TABLE])
    mixers = dict(MIXERS)

    def run(page: str) -> dict:
        names = {"__name__": page} | ASSUMED.get(page, {})
        for number, block in enumerate(python_blocks(page), 1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
        return names

    yield run
    for name in set(MIXERS) - set(mixers):
        del MIXERS[name]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_every_python_block_of_a_page_runs(page, run_blocks, capsys):
    run_blocks(page)
    assert PRINTED.get(page, "") in capsys.readouterr().out


def test_pages_with_python_are_found():
    assert {"README.md", "docs/ops.md", *PRINTED} <= set(WITH_PYTHON)


def test_the_examples_of_the_ops_page_give_what_it_says(run_blocks):
    names = run_blocks("docs/ops.md")
    assert names["state"].shape == (2, 2, 4, 64, 64)
    assert names["packed"].shape == (1, 5, 5)
    assert names["o"].shape == (2, 4, 64)
    assert names["pool"].abs().amax((0, 2, 3, 4)).nonzero().flatten().tolist() == [7, 12]


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file(page):
    missing = [link for link in relative_links(page) if not ((ROOT / page).parent / link).exists()]
    assert not missing

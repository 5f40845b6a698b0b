"""Huge pages are a hint: nothing may change but the time."""

from __future__ import annotations

import torch

from mdn.ops.cpu.huge_pages import HUGE_PAGE, prefer_huge_pages


def test_numbers_and_addresses_stay() -> None:
    for size in (0, 10, HUGE_PAGE - 1, 3 * HUGE_PAGE + 5):
        x = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        before, address = x.clone(), x.data_ptr()
        prefer_huge_pages(x)
        assert torch.equal(x, before)
        assert x.data_ptr() == address
        x.add_(1)  # and can be written


def test_neighbours_are_treated_as_one() -> None:
    x = torch.zeros(4 * HUGE_PAGE, dtype=torch.uint8)
    parts = x.split(HUGE_PAGE)
    prefer_huge_pages(*parts)
    assert not x.any()

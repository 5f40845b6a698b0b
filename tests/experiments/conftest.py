"""What tests of grids share."""

import pytest

from mdn.experiments import grid


@pytest.fixture
def in_this_process(monkeypatch):
    """Cells run without workers; their names, in order."""
    seen = []

    def completed(job, jobs, processes):
        for (cell,) in jobs:
            seen.append(cell.name)
            yield job(cell)

    monkeypatch.setattr(grid, "completed", completed)
    return seen

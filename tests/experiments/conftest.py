"""What tests of grids and studies share."""

import pytest

from mdn.experiments import grid
from mdn.experiments.studies.contestants import contestant
from mdn.experiments.studies.study import TUNING_SEED, StudyCell
from mdn.experiments.studies.summary import summarise
from study_cases import record, tiny


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


@pytest.fixture
def recorded(tmp_path):
    """Two contestants with two seeds: 0.1 and 0.3, 0.5 and 0.5."""
    study = tiny(rates=(1e-2,))
    (task,) = study.tasks
    for name, scores in {"mdn": (0.1, 0.3), "gdn": (0.5, 0.5)}.items():
        for seed, score in ((TUNING_SEED, 0.9), *enumerate(scores)):
            record(study, tmp_path, StudyCell(task, contestant(name), 1e-2, seed), score)
    return summarise(study, tmp_path)

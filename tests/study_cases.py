"""A study of one task with runs of four steps, and recorded cells without training."""

import dataclasses

from mdn.common.results import write_results
from mdn.experiments import grid
from mdn.experiments.studies import oscillation
from mdn.experiments.studies.study import Study


def tiny(name="resonator", **changes):
    """A study of one task, with runs of four steps."""
    task = dataclasses.replace(
        oscillation.STUDY.task(name), contestants=("mdn", "gdn"), seeds=2, steps=4, examples=2, **changes
    )
    return Study("tiny", "Does it run?", (task,))


def record(study, out, cell, value, **more):
    """A recorded cell with the same score in every test."""
    facts = {"parameters": 10, "state_numbers": 4, "diverged_at": None, "curve": [], "processor_seconds": 30.0}
    result = {"settings": cell.settings(), "scores": {"1x": value, "2x": value}, "baselines": {}, **facts, **more}
    write_results(grid.cell_path(out / study.name, cell), "cell", result)

"""The kinds of result files: the title of each on the report page, and the module that shows it.

Such a module has ``tables(content)`` and, where there is something to draw, ``draw(content)``; ``content`` is what
``read_results`` returns. A new experiment is one line here.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from mdn.common.results import Table


class Kind(NamedTuple):
    title: str
    module: str


KINDS = {
    "eval": Kind("Evaluations", "mdn.evaluation.tables"),
    "mqar": Kind("Associative recall", "mdn.experiments.mqar_results"),
    "needle": Kind("Needles", "mdn.evaluation.needle"),
    "ablations": Kind("Ablations", "mdn.experiments.ablation_results"),
    "study": Kind("Studies", "mdn.experiments.studies.summary"),
    "momentum-pays": Kind("Where momentum pays", "mdn.experiments.studies.overview"),
    "causality": Kind("Causality", "mdn.experiments.causality"),
    "spectra": Kind("Spectra", "mdn.analysis.spectra"),
    "stability": Kind("Stability", "mdn.analysis.stability"),
    "state-norm": Kind("Change of the state", "mdn.analysis.state_norm"),
    "decode": Kind("Decoding speed", "mdn.bench.decoding"),
    "train": Kind("Training speed", "mdn.bench.training_step"),
    "op": Kind("Operator speed", "mdn.bench.op_results"),
    "context-parallel": Kind("Context parallelism", "mdn.bench.context_parallel_results"),
}
"""in the order of the page"""


def tables_of(content: dict[str, Any]) -> list[Table]:
    """The tables of a result file; of an unknown kind, its numbers. Raises if the content is not of its kind."""
    kind = content["kind"]
    if kind not in KINDS:
        return _anything(content)
    try:
        return importlib.import_module(KINDS[kind].module).tables(content)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ValueError(f"not a complete result of kind {kind!r} ({type(error).__name__}: {error})") from None


def draw_result(content: dict[str, Any]) -> Any:
    """The figure of a result file."""
    kind = content["kind"]
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return importlib.import_module(KINDS[kind].module).draw(content)


def _anything(content: dict[str, Any]) -> list[Table]:
    """The numbers and words of the two uppermost levels."""
    rows = []
    for name, value in content.items():
        if isinstance(value, dict):
            rows += [[f"{name}: {key}", number(v)] for key, v in value.items() if isinstance(v, int | float | str)]
        elif isinstance(value, int | float | str) and name not in ("kind", "command"):
            rows.append([name, number(value)])
    return [Table("", ["what", "value"], rows)] if rows else []


def number(value: Any, digits: int = 3) -> str:
    """A number for people; words and missing values as they are."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:,.{digits}f}"

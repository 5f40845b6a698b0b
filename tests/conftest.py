"""Every worker of `pytest -n 2` keeps to one core; child processes import the same package and helpers as the tests."""

import os
from pathlib import Path

import pytest
import torch

import mdn
from mdn.ops.backends import why_not
from mdn.ops.cpu import bindings

torch.set_num_threads(1)
_IMPORTED_FROM = [Path(__file__).parent, *(Path(folder).parent for folder in mdn.__path__)]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _IMPORTED_FROM), os.environ.get("PYTHONPATH", "")]).rstrip(":")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    reason = why_not("cpu", torch.zeros(1))
    if reason is not None:
        for item in filter(_needs_native_kernel, items):
            item.add_marker(pytest.mark.skip(reason=reason))


def _needs_native_kernel(item):
    """Marked so, or a case of the backend "cpu"."""
    case = getattr(item, "callspec", None)
    return item.get_closest_marker("native") is not None or (case is not None and "cpu" in case.id.split("-"))


@pytest.fixture(params=bindings.INSTRUCTION_SETS)
def every_instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Each variant that was built and that this processor can run."""
    monkeypatch.setenv("MDN_CPU_ISA", request.param)
    bindings._find.cache_clear()
    if bindings.why_unavailable() is not None:
        monkeypatch.undo()
        bindings._find.cache_clear()
        pytest.skip(f"{request.param} cannot run here")
    yield
    monkeypatch.undo()
    bindings._find.cache_clear()

"""What tests of ops share."""

import pytest

from mdn.ops.cpu import bindings


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
